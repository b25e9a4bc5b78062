"""Whole merges on disk: their values, their folders, and what a failed one leaves behind."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergekit_iso.checkpoints.verify import verify
from mergekit_iso.errors import CheckpointError, MethodError, NonFiniteError, OutputError
from mergekit_iso.events import Event, Finished, Progress, Started, Warned
from mergekit_iso.execute import merge_checkpoints
from mergekit_iso.merge import merge, task_vector
from mergekit_iso.methods import TaskArithmetic

CHUNKED = (1 << 20) + 5  # one flat chunk and a bit


def tensors(seed: int, *, like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A model of odd shapes and dtypes; a fine-tune of ``like`` where it is given."""
    torch.manual_seed(seed)
    if like is not None:
        return {
            name: (t + 0.02 * torch.randn(t.shape)).to(t.dtype)
            if t.is_floating_point()
            else t.clone()
            for name, t in like.items()
        }
    return {
        "model.embed_tokens.weight": torch.randn(24, 16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(40, 16).bfloat16(),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 8, 16),
        "model.layers.0.conv.weight": torch.randn(2, 3, 1, 5).half(),
        "model.long": torch.randn(CHUNKED).bfloat16(),
        "model.norm.weight": torch.ones(16, dtype=torch.float64),
        "model.scalar": torch.tensor(0.5),
        "model.steps": torch.tensor([3, 4]),
        "model.mask": torch.tensor([True, False, True]),
        "model.empty.weight": torch.empty(0, 16),
    }


@dataclass(frozen=True)
class Family:
    """Folders ``base``, ``m0``, ``m1``, … with these tensors in them."""

    folder: Path
    base: dict[str, Tensor]
    models: tuple[dict[str, Tensor], ...]

    def merge(self, method: Any = "task_arithmetic", out: str = "out", **keywords: Any) -> Any:
        models = [self.folder / f"m{i}" for i in range(len(self.models))]
        return merge_checkpoints(
            self.folder / "base", models, method, self.folder / out, **keywords
        )

    def output(self, out: str = "out") -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path in sorted((self.folder / out).glob("*.safetensors")):
            found |= load_file(path)
        return found

    def rewrite(self, name: str, **changes: Tensor) -> None:
        path = self.folder / name / "model.safetensors"
        save_file(load_file(path) | {k.replace("__", "."): v for k, v in changes.items()}, path)


def write_model(folder: Path, model: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    save_file(model, folder / "model.safetensors")
    (folder / "config.json").write_text('{"vocab_size": 24}\n')


@pytest.fixture
def family(tmp_path: Path) -> Family:
    base = tensors(0)
    models = tuple(tensors(i + 1, like=base) for i in range(3))
    for name, model in zip(("base", "m0", "m1", "m2"), (base, *models), strict=True):
        write_model(tmp_path / name, model)
    return Family(tmp_path, base, models)


@pytest.fixture
def small(tmp_path: Path) -> Family:
    """Two models of one matrix and one vector."""
    torch.manual_seed(0)
    base = {"a.weight": torch.randn(6, 4), "b": torch.randn(5)}
    models = tuple({n: t + 0.02 * torch.randn(t.shape) for n, t in base.items()} for _ in range(2))
    for name, model in zip(("base", "m0", "m1"), (base, *models), strict=True):
        write_model(tmp_path / name, model)
    return Family(tmp_path, base, models)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.fixture
def untouched(small: Family) -> Iterator[None]:
    """The folder around the inputs must hold the same files, and nothing more, afterwards."""
    before = files_of(small.folder)
    yield
    assert files_of(small.folder) == before
    assert names_in(small.folder) == {"base", "m0", "m1"}


# --- values


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("task_arithmetic", {}),
        ("average", {}),
        ("ties", {}),
        ("ties", {"scope": "tensor"}),
        ("dare", {"drop_rate": 0.5}),
        ("dare_ties", {}),
        ("iso_c", {}),
        ("iso_cts", {}),
        ("tsv", {}),
    ],
)
def test_values_are_those_of_merge_bit_for_bit(
    family: Family, method: str, options: dict[str, Any]
) -> None:
    keywords: dict[str, Any] = {"weights": (1.0, 0.5, 2.0), "scale": 0.7, "seed": 3}
    family.merge(method, max_shard_size=3000, **keywords, **options)
    deltas = [task_vector(family.base, model) for model in family.models]
    expected = merge(family.base, deltas, method, **keywords, **options)
    got = family.output()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert verify(family.folder / "out").problems == ()


def test_equal_merges_give_equal_folders_wherever_they_run(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.merge("dare", out="first")
    monkeypatch.chdir(family.folder)
    merge_checkpoints("base", ["./m0", "m1", "m2"], "dare", "deep/second")
    assert files_of(family.folder / "first") == files_of(family.folder / "deep/second")


def test_values_do_not_depend_on_the_shards(family: Family) -> None:
    family.merge("iso_c", out="one")
    family.merge("iso_c", out="many", max_shard_size=1)
    one, many = family.output("one"), family.output("many")
    assert len(list((family.folder / "many").glob("*.safetensors"))) > 5
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_buffers_are_the_bases_bits_unchecked(small: Family) -> None:
    odd = torch.tensor([float("inf"), float("nan"), -0.0])
    for name in ("base", "m0", "m1"):
        small.rewrite(name, rotary__inv_freq=odd)
    small.merge()
    assert torch.equal(small.output()["rotary.inv_freq"].view(torch.int32), odd.view(torch.int32))


def test_keep_base_leaves_a_tensor_at_the_base(small: Family) -> None:
    small.merge(keep_base=["a.*"])
    assert torch.equal(small.output()["a.weight"], small.base["a.weight"])
    assert not torch.equal(small.output()["b"], small.base["b"])


def test_a_tied_duplicate_repeats_the_merged_embedding(tmp_path: Path) -> None:
    for number, name in enumerate(("base", "m0", "m1")):
        torch.manual_seed(number)
        shared = 1 + 0.02 * torch.randn(24, 8)
        model = {"model.embed_tokens.weight": shared, "lm_head.weight": shared.clone()}
        write_model(tmp_path / name, model)
        config = {"vocab_size": 24, "tie_word_embeddings": True}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    merge_checkpoints(
        tmp_path / "base", [tmp_path / "m0", tmp_path / "m1"], "dare", tmp_path / "out"
    )
    got = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    assert verify(tmp_path / "out").problems == ()


def test_a_model_of_weight_0_is_not_even_read(small: Family) -> None:
    small.rewrite("m1", b=torch.full((5,), float("nan")))
    small.merge(weights=(1.0, 0.0))
    expected = small.base["b"] + (small.models[0]["b"] - small.base["b"])
    assert torch.equal(small.output()["b"], expected)


def test_no_weight_at_all_gives_the_base_or_no_mean(small: Family) -> None:
    small.merge(weights=0.0, out="sum")
    assert torch.equal(small.output("sum")["a.weight"], small.base["a.weight"])
    with pytest.raises(MethodError, match="weights sum to 0"):
        small.merge("average", weights=0.0)


def test_out_dtype_rounds_once_to_it(small: Family) -> None:
    small.merge(out_dtype="bfloat16")
    deltas = [task_vector(small.base, model) for model in small.models]
    expected = merge(small.base, deltas, "task_arithmetic")["a.weight"].bfloat16()
    assert torch.equal(small.output()["a.weight"], expected)


# --- refusals that name what is wrong


@pytest.mark.usefixtures("untouched")
def test_options_beside_a_method_object_are_refused(small: Family) -> None:
    with pytest.raises(MethodError, match="density"):
        small.merge(TaskArithmetic(), density=0.2)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("device", ["gpu9", "meta", "cuda:99", "hpu", "mps", "cpu!"])
def test_a_device_that_is_not_there_is_refused(small: Family, device: str) -> None:
    with pytest.raises(MethodError, match=f"device '{device}'") as caught:
        small.merge(device=device)
    assert len(str(caught.value)) < 120
    assert caught.value.hint == "use cpu, cuda or cuda:N"


def test_threads_are_set_for_the_run_only(small: Family) -> None:
    seen = []
    before = torch.get_num_threads()
    most = os.cpu_count() or 1
    small.merge(threads=most, on_event=lambda _: seen.append(torch.get_num_threads()))
    assert most in seen
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("threads", [0, -1, 100_000, "2", 1.0, True])
def test_threads_that_cannot_be_had_are_refused(small: Family, threads: Any) -> None:
    with pytest.raises(MethodError, match=f"threads cannot be {threads!r}"):
        small.merge(threads=threads)


@pytest.mark.parametrize("where", ["base", "m1"])
@pytest.mark.parametrize("method", ["task_arithmetic", "iso_c", "ties"])
def test_nan_is_named_with_model_tensor_and_count(small: Family, where: str, method: str) -> None:
    bad = small.base["a.weight"].clone()
    bad[1, 2], bad[3, 0] = float("nan"), float("inf")
    small.rewrite(where, a__weight=bad)
    with pytest.raises(NonFiniteError, match=rf"a\.weight of .*{where}.* has 2 values"):
        small.merge(method)
    assert names_in(small.folder) == {"base", "m0", "m1"}


@pytest.mark.usefixtures("untouched")
def test_a_value_too_large_for_the_output_dtype_is_refused(small: Family) -> None:
    with pytest.raises(NonFiniteError, match=r"(a\.weight|b) .*float16") as caught:
        small.merge(out_dtype="float16", scale=1e8)
    assert "--out-dtype" in str(caught.value.hint)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("method", ["task_arithmetic", "average", "iso_c", "tsv", "ties", "dare"])
@pytest.mark.parametrize("weight", [1e39, 1e38])
def test_weights_too_large_for_the_compute_dtype_are_named(
    small: Family, method: str, weight: float
) -> None:
    before = (small.folder / "m1" / "model.safetensors").read_bytes()
    small.rewrite("m1", a__weight=small.base["a.weight"] + 100)
    with pytest.raises(NonFiniteError, match=r"a\.weight .* do not fit float32: the weights or"):
        small.merge(method, weights=weight)
    (small.folder / "m1" / "model.safetensors").write_bytes(before)


def test_the_way_out_of_float32_is_not_float32(small: Family) -> None:
    with pytest.raises(NonFiniteError, match=r"(a\.weight|b) would .* fit float32") as caught:
        small.merge(scale=1e39)
    assert "smaller scale, or --dtype float64 with --out-dtype float64" in str(caught.value.hint)
    small.merge(scale=1e39, dtype="float64", out_dtype="float64")
    with pytest.raises(NonFiniteError, match="fit float64") as caught:
        small.merge(scale=1e300, weights=1e30, dtype="float64", out_dtype="float64", out="other")
    assert "dtype" not in str(caught.value.hint)


@pytest.mark.usefixtures("untouched")
def test_a_tensor_that_does_not_fit_into_memory_is_named(small: Family) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hungry(TaskArithmetic):
        def finalize(self, total: Tensor, info: Any, ctx: Any) -> Tensor:
            return torch.empty(1 << 50)

    with pytest.raises(CheckpointError, match=r"not enough memory to merge a\.weight.*96 bytes"):
        small.merge(Hungry())


def test_another_runtime_error_stays_what_it_is(small: Family) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(TaskArithmetic):
        def finalize(self, total: Tensor, info: Any, ctx: Any) -> Tensor:
            return total + torch.zeros(7, 7)

    with pytest.raises(RuntimeError, match="size of tensor"):
        small.merge(Wrong())


@pytest.mark.usefixtures("untouched")
def test_one_model_that_is_no_list_is_refused(small: Family) -> None:
    for models in (str(small.folder / "m0"), small.folder / "m0"):
        with pytest.raises(MethodError, match="models must be a list"):
            merge_checkpoints(small.folder / "base", models, "average", small.folder / "out")  # type: ignore[arg-type]


def test_models_may_come_from_an_iterator(small: Family) -> None:
    models: Any = (small.folder / name for name in ("m0", "m1"))
    merge_checkpoints(small.folder / "base", models, "task_arithmetic", small.folder / "out")
    small.merge(out="other")
    assert files_of(small.folder / "out") == files_of(small.folder / "other")


@pytest.mark.usefixtures("untouched")
def test_an_input_is_found_behind_a_tilde(small: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(small.folder))
    with pytest.raises(OutputError, match="input '~/m0'"):
        merge_checkpoints("~/base", ["~/m0"], "average", "~/m0/out")


def test_a_failing_decomposition_names_the_tensor(small: Family) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Failing(TaskArithmetic):
        def finalize(self, total: Tensor, info: Any, ctx: Any) -> Tensor:
            torch.linalg.inv(torch.zeros(2, 2))
            return total

    with pytest.raises(CheckpointError, match=r"decomposition of (a\.weight|b) failed"):
        small.merge(Failing())
    assert names_in(small.folder) == {"base", "m0", "m1"}


# --- the output folder


def test_an_empty_folder_and_missing_parents_are_fine(small: Family) -> None:
    (small.folder / "empty").mkdir()
    small.merge(out="empty")
    small.merge(out="new/deeper/out")
    assert names_in(small.folder / "new/deeper") == {"out"}
    assert ".mergekit-iso.lock" not in names_in(small.folder / "empty")


def test_a_folder_in_use_and_a_file_are_refused(small: Family) -> None:
    (small.folder / "out").mkdir()
    (small.folder / "out" / "mine").write_text("keep")
    (small.folder / "file").write_text("keep")
    before = files_of(small.folder)
    for out in ("out", "file"):
        for force in (False, True):
            with pytest.raises(OutputError, match="already exists"):
                small.merge(out=out, force=force)
    assert files_of(small.folder) == before


def test_force_replaces_the_old_output_whole(small: Family) -> None:
    old = small.folder / "out"
    old.mkdir()
    (old / "model-00001-of-00009.safetensors").write_bytes(b"stale")
    small.merge(force=True)
    assert verify(old).ok
    assert names_in(small.folder) == {"base", "m0", "m1", "out"}


def test_a_failed_run_with_force_keeps_the_old_output(small: Family) -> None:
    (small.folder / "out").mkdir()
    (small.folder / "out" / "config.json").write_text("keep")
    small.rewrite("m1", b=torch.full((5,), float("nan")))
    with pytest.raises(NonFiniteError):
        small.merge(force=True)
    assert files_of(small.folder / "out") == {"config.json": b"keep"}
    assert names_in(small.folder) == {"base", "m0", "m1", "out"}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("out", ["m0", "base/merged", "m1/a/b", ".", "link"])
def test_an_output_that_touches_an_input_is_refused(
    small: Family, out: str, force: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = small.folder / out
    if out == "link":
        path = tmp_path_factory.mktemp("links") / "link"
        path.symlink_to(small.folder / "m0")
    models = [small.folder / "m0", small.folder / "m1"]
    with pytest.raises(OutputError, match="input"):
        merge_checkpoints(small.folder / "base", models, "average", path, force=force)


def test_a_single_file_input_does_not_claim_its_folder(small: Family) -> None:
    files = [small.folder / f"m{i}" / "model.safetensors" for i in range(2)]
    out = small.folder / "m0" / "out"
    merge_checkpoints(small.folder / "base", files, "average", out)
    assert verify(out).ok


def test_a_parent_that_is_a_file_is_named(small: Family) -> None:
    (small.folder / "file").write_text("keep")
    before = files_of(small.folder)
    with pytest.raises(OutputError, match=r"would lie under .*file, which is not a folder"):
        small.merge(out="file/deeper/out")
    assert files_of(small.folder) == before


def test_a_foreign_partial_folder_is_left_alone(small: Family) -> None:
    (small.folder / "out.partial").mkdir()
    (small.folder / "out.partial" / "mine").write_text("keep")
    with pytest.raises(OutputError, match=r"out\.partial is in the way"):
        small.merge()
    assert files_of(small.folder / "out.partial") == {"mine": b"keep"}


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs a mount point")
def test_a_mount_point_is_refused_before_any_work(small: Family) -> None:
    models = [small.folder / "m0"]
    with pytest.raises(OutputError, match="mount point"):
        merge_checkpoints(small.folder / "base", models, "average", "/proc")


@pytest.mark.usefixtures("untouched")
def test_parents_made_for_a_failed_run_are_removed(small: Family) -> None:
    with pytest.raises(NonFiniteError):
        small.merge(out="new/deeper/out", out_dtype="float16", scale=1e9)


@pytest.mark.usefixtures("untouched")
def test_a_write_that_fails_is_one_sentence_and_leaves_nothing(small: Family) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model\.safetensors could not be written"):
            small.merge()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_middle_leaves_nothing(
    small: Family, interruption: type[BaseException]
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress):
            raise interruption

    with pytest.raises(interruption):
        small.merge(on_event=stop)


def test_an_input_that_changes_during_the_run_is_noticed(small: Family) -> None:
    path = small.folder / "m1" / "model.safetensors"

    def touch(event: Event) -> None:
        if isinstance(event, Progress):
            os.utime(path, ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"model\.safetensors of .*m1.* was changed"):
        small.merge(on_event=touch)
    assert names_in(small.folder) == {"base", "m0", "m1"}


# --- what is carried, told and warned of


def test_other_files_of_the_base_come_along_byte_for_byte(small: Family) -> None:
    (small.folder / "base" / "generation_config.json").write_bytes(b'{ "temperature":0.5 }')
    (small.folder / "base" / "assets").mkdir()
    (small.folder / "base" / "assets" / "vocab.txt").write_bytes(b"a\r\nb")
    small.merge()
    got = files_of(small.folder / "out")
    assert got["generation_config.json"] == b'{ "temperature":0.5 }'
    assert got["assets/vocab.txt"] == b"a\r\nb"
    assert got["config.json"] == (small.folder / "base" / "config.json").read_bytes()


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs an unreadable file")
def test_a_carried_file_that_cannot_be_read_is_named_as_the_bases(small: Family) -> None:
    (small.folder / "base" / "notes.txt").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"notes\.txt of the base .* could not be read"):
        small.merge()
    assert names_in(small.folder) == {"base", "m0", "m1"}


def test_a_config_may_hold_what_only_json_can(small: Family) -> None:
    (small.folder / "base" / "config.json").write_text(r'{"dtype": "float32", "a": "\ud800é"}')
    small.merge(out_dtype="bfloat16")
    assert json.loads((small.folder / "out" / "config.json").read_bytes())["a"] == "\ud800é"
    assert verify(small.folder / "out").ok


@pytest.mark.parametrize("moved", ["base", "m1", "m1/model.safetensors"])
def test_an_input_whose_name_is_not_text_is_merged(small: Family, moved: str) -> None:
    odd = os.fsdecode(b"caf\xe9.safetensors")
    (small.folder / moved).rename((small.folder / moved).parent / odd)
    paths = {name: small.folder / name for name in ("base", "m0", "m1")}
    paths[moved.partition("/")[0]] = (small.folder / moved).parent / odd
    base, *models = paths.values()
    merge_checkpoints(base, models, "task_arithmetic", small.folder / "out")
    assert verify(small.folder / "out").ok
    assert "caf?" in (small.folder / "out" / "mergekit_iso.json").read_text()


def test_events_tell_of_every_tensor_and_byte(small: Family) -> None:
    events: list[Event] = []
    result = small.merge(on_event=events.append)
    assert events[0] == Started(2, (24 + 5) * 4)
    progress = [e for e in events if isinstance(e, Progress)]
    assert {e.tensor for e in progress} == {"a.weight", "b"}
    assert sum(e.bytes for e in progress) == result.bytes == (24 + 5) * 4
    assert isinstance(events[-1], Finished)
    assert json.loads(json.dumps(result.to_json()))["shards"] == ["model.safetensors"]


def warnings_of(family: Family, method: str = "task_arithmetic") -> tuple[str, ...]:
    events: list[Event] = []
    result = family.merge(method, on_event=events.append)
    assert result.warnings == tuple(e.message for e in events if isinstance(e, Warned))
    manifest = json.loads((family.folder / "out" / "mergekit_iso.json").read_text())
    assert len(manifest["warnings"]) == len(result.warnings)
    return tuple(result.warnings)


def test_an_honest_family_gives_no_warning(small: Family) -> None:
    assert warnings_of(small, "iso_c") == ()


def test_an_unrelated_model_is_warned_of_with_the_ratio(small: Family) -> None:
    small.rewrite("m1", a__weight=torch.randn(6, 4))
    (warning,) = warnings_of(small)
    assert "m1" in warning
    assert "probably no fine-tune" in warning
    assert "|Δ|/|base| = 1." in warning


def test_a_model_of_the_bases_values_is_warned_of(small: Family) -> None:
    small.rewrite("m1", a__weight=small.base["a.weight"].double(), b=small.base["b"])
    assert any("m1" in w and "identical" in w for w in warnings_of(small))


def test_a_model_is_not_called_identical_for_what_is_not_merged(small: Family) -> None:
    small.rewrite("m1", a__weight=small.base["a.weight"])
    result = small.merge(keep_base="b")
    assert any("m1' is identical to the base in all that is merged" in w for w in result.warnings)


def test_rounding_noise_is_warned_of_for_spectral_methods_only(small: Family) -> None:
    noisy = small.base["a.weight"].bfloat16()
    small.rewrite("m1", a__weight=noisy)
    (warning,) = warnings_of(small, "iso_c")
    assert "m1" in warning
    assert "rounding noise" in warning
    assert "rank_tolerance" in warning
    small.merge("ties", out="other")
    manifest = json.loads((small.folder / "other" / "mergekit_iso.json").read_text())
    assert manifest["warnings"] == []
