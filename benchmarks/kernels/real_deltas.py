"""Real pseudo-gradients: the mean delta of four workers of a small language model.

A Llama-style model learns the bytes of Python's standard library. After a warm-up every worker
goes on alone for some steps, with its own copy of the optimizer's state and its own part of the
data, and the mean of their deltas is what an outer step would hand to Iso-C.

    python -m benchmarks.kernels.real_deltas --out DIR
"""

from __future__ import annotations

import sysconfig
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, Literal

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Kind = Literal["attention", "mlp", "embedding"]


@dataclass(frozen=True)
class Run:
    """A training run; ``steps`` are the steps of each worker after ``warmup`` common ones."""

    hidden: int = 512
    layers: int = 3
    ffn: int = 1408
    heads: int = 8
    context: int = 128
    batch: int = 8
    warmup: int = 120
    workers: int = 4
    steps: int = 30
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def file_name(self) -> str:
        """The file that holds this run's deltas; a run is named by what shapes it."""
        steps = f"{self.warmup}+{self.steps}"
        return f"real-{self.hidden}x{self.layers}-{steps}-seed{self.seed}.safetensors"


SMOKE = Run(hidden=64, layers=1, ffn=160, heads=4, context=32, warmup=6, workers=2, steps=3)


def kind_of(name: str) -> Kind:
    """Return which group of matrices a parameter belongs to."""
    if "self_attn" in name:
        return "attention"
    return "mlp" if "mlp" in name else "embedding"


def real_deltas(run: Run, folder: Path) -> dict[str, Tensor]:
    """Return the mean delta of every matrix by parameter name, training at the first call."""
    file = folder / run.file_name
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(train(run), file)
    return load_file(file)


def train(run: Run) -> dict[str, Tensor]:
    """Train as ``run`` says and return the mean delta of every matrix, float32."""
    torch.manual_seed(run.seed)
    parts = _corpus().chunk(run.workers + 1)
    model = _model(run)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    _steps(model, optimizer, parts[0], run.warmup, run, seed=run.seed)
    anchor, state = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.dim() == 2}
    for worker in range(run.workers):
        model.load_state_dict(anchor)
        optimizer.load_state_dict(deepcopy(state))
        _steps(model, optimizer, parts[worker + 1], run.steps, run, seed=run.seed + worker + 1)
        for name, p in model.named_parameters():
            if name in total:
                total[name] += (p.detach() - anchor[name]) / run.workers
    return total


def _corpus() -> Tensor:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _model(run: Run) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=run.hidden,
        intermediate_size=run.ffn,
        num_hidden_layers=run.layers,
        num_attention_heads=run.heads,
        num_key_value_heads=run.heads,
        max_position_embeddings=run.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _steps(
    model: nn.Module, optimizer: Any, data: Tensor, steps: int, run: Run, *, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - run.context, (run.batch, 1), generator=generator)
        tokens = data[starts + torch.arange(run.context)].long()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def describe(A: Tensor) -> dict[str, float]:
    """Return condition, σ₁/‖A‖_F, RMS/mean σ and the share of σ below 1e-3·σ₁ of a matrix."""
    sigma = torch.linalg.svdvals(A.double())
    return {
        "condition": float(sigma[0] / sigma[-1]),
        "sigma1_over_norm": float(sigma[0] / sigma.norm()),
        "rms_over_mean": float(sigma.square().mean().sqrt() / sigma.mean()),
        "below_1e-3": float((sigma < 1e-3 * sigma[0]).double().mean()),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/kernels"))
@click.option("--smoke", is_flag=True, help="A tiny model and a few steps.")
def main(out: Path, smoke: bool) -> None:
    """Train the model if need be, and describe the delta of every matrix."""
    torch.set_num_threads(1)
    run = SMOKE if smoke else Run()
    click.echo(f"{asdict(run)}")
    start = process_time()
    folder = out / "cache"
    deltas = real_deltas(run, folder)
    click.echo(f"{process_time() - start:.0f} s of process time, {folder / run.file_name}")
    click.echo(
        f"{'matrix':<44}{'shape':>12}{'condition':>11}{'s1/norm':>9}{'rms/mean':>10}{'<1e-3':>7}"
    )
    for name, A in deltas.items():
        d = describe(A)
        click.echo(
            f"{name:<44}{'x'.join(map(str, A.shape)):>12}{d['condition']:>11.1e}"
            f"{d['sigma1_over_norm']:>9.2f}{d['rms_over_mean']:>10.2f}{d['below_1e-3']:>7.0%}"
        )


if __name__ == "__main__":
    main()
