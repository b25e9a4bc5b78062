PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/mergekit-iso demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2

# mypy checks the packages as they are installed: cli/ inside mergekit_iso/.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	rm -rf build/typed && mkdir -p build/typed/mergekit_iso
	ln -s $(CURDIR)/mergekit_iso/* $(CURDIR)/cli build/typed/mergekit_iso
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p mergekit_iso

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@
