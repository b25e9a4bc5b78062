"""Where a merge may write, and what it never replaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergekit_iso.checkpoints.output import check_output, output_folder
from mergekit_iso.errors import CheckpointError, OutputError


def refusal(out: str | Path, *, force: bool = True) -> OutputError:
    with pytest.raises(OutputError) as caught:
        check_output(out, {}, force=force)
    assert "\n" not in str(caught.value)
    assert str(out) in str(caught.value)
    return caught.value


def filled(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("kept")
    return folder


@pytest.mark.parametrize(
    "name", ["config.json", "mergekit_iso.json", "model.safetensors", "part-1.safetensors"]
)
def test_force_replaces_a_model(tmp_path: Path, name: str) -> None:
    out = filled(tmp_path / "out", name, "notes.txt")
    assert check_output(out, {}, force=True) == out
    assert "--force" in str(refusal(out, force=False).hint)


def test_force_replaces_no_other_folder(tmp_path: Path) -> None:
    out = filled(tmp_path / "out", "thesis.tex")
    (out / "deeper").mkdir()
    (out / "deeper" / "config.json").write_text("{}")
    (out / "model.safetensors").mkdir()
    for force in (False, True):
        error = refusal(out, force=force)
        assert "is not empty and does not look like a model, so it is not replaced" in str(error)
        assert "--force" not in str(error.hint)


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    assert check_output(filled(tmp_path / "out"), {}, force=False) == tmp_path / "out"


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("kept")
    error = refusal(file, force=force)
    assert "is a file" in str(error)
    assert "--force" not in str(error.hint)


@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_and_a_device_are_never_replaced(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", Path(os.devnull)):
        assert "is neither a file nor a folder" in str(refusal(out, force=force))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("out", [".", "..", "/", "./", "../..", "~", "~/.."])
def test_the_current_and_the_home_folder_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, force: bool
) -> None:
    here = filled(tmp_path / "here", "config.json")
    home = filled(tmp_path / "home", "config.json")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    assert "is never replaced" in str(refusal(out, force=force))


@pytest.mark.parametrize("out", ["", "a\0b"])
def test_what_is_no_name_is_refused(out: str) -> None:
    with pytest.raises(OutputError, match="the output folder cannot be"):
        check_output(out, {}, force=True)


def test_a_leading_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_output("~/out", {}, force=False) == tmp_path / "out"


@pytest.mark.parametrize("out", ["file/out", "file/deeper/out"])
def test_an_output_under_a_file_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("kept")
    assert f"would lie under {tmp_path / 'file'}" in str(refusal(tmp_path / out))


@pytest.mark.parametrize("out", ["loop", "loop/out"])
def test_a_link_to_itself_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "leads in a circle" in str(refusal(tmp_path / out))


def test_a_current_folder_that_is_gone_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = filled(tmp_path / "gone")
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert check_output(tmp_path / "out", {}, force=False) == tmp_path / "out"
    with pytest.raises(CheckpointError, match="out could not be found"):
        check_output("out", {}, force=False)


def test_a_disk_that_is_too_small_is_said_with_all_that_is_needed(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    nearly = disk.f_bavail * disk.f_frsize - 1  # fits, were it not for manifest and model card
    with (
        pytest.raises(CheckpointError, match=r"out needs [\d,]+ bytes .* only [\d,]+ free") as full,
        output_folder(tmp_path / "out", nearly, force=False),
    ):
        pass
    needed, free = (
        int(word.replace(",", "")) for word in str(full.value).split() if word[0].isdigit()
    )
    assert needed > free
    assert list(tmp_path.iterdir()) == []


def _read_only_mount() -> str | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, _, options, *_ = line.split()
        if "ro" in options.split(",") and os.path.isdir(folder):
            return folder
    return None


def test_a_read_only_file_system_is_not_a_full_disk() -> None:
    mount = _read_only_mount() if Path("/proc/mounts").exists() else None
    if mount is None:
        pytest.skip("needs a file system that is mounted read-only")
    with (
        pytest.raises(CheckpointError, match="file system is read-only"),
        output_folder(Path(mount, "out"), 1000, force=False),
    ):
        pass


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_during_the_run_is_not_replaced(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(OutputError, match="does not look like a model"),
        output_folder(out, 10, force=force),
    ):
        filled(out, "mine")
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert (out / "mine").read_text() == "kept"
