from __future__ import annotations

import json

import torch


def test_env_names_the_versions_that_run(run) -> None:
    facts = json.loads(run("env", "--json").stdout)
    assert facts["torch"] == torch.__version__
    assert {"mergekit-iso", "safetensors", "transformers", "python", "platform"} <= facts.keys()
    assert facts["torch"] in run("env").stdout
