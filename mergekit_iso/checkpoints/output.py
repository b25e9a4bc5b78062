"""The output folder: written aside under a lock, and given its name only when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, OutputError
from .checkpoint import Checkpoint

LOCK_NAME = ".mergekit-iso.lock"
# Room for headers, manifest and model card beside the tensors.
_SLACK_BYTES = 1 << 20
# Any of these, or a .safetensors file, tells a model's folder from others.
_MODEL_FILES = ("config.json", "mergekit_iso.json")


@contextmanager
def os_errors(path: str | Path, verb: str = "written", needed: int | None = None) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        size = f" (the output takes {needed:,} bytes)" if needed else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"{path} could not be {verb}: the disk is full{size}",
                hint="free some space, or write to another disk",
            ) from error
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} could not be {verb}: {reason}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and bring it to the disk."""
    with os_errors(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def source_path(checkpoint: Checkpoint) -> Path:
    """Return what must not be written to: an input's folder, or the one file that it is."""
    folder = Path(os.path.realpath(checkpoint.folder))
    return folder / checkpoint.weight_files[0] if checkpoint.single_file else folder


def source_paths(*checkpoints: Checkpoint) -> dict[str, Path]:
    """Return what must not be written to, by what the user typed."""
    return {c.label: source_path(c) for c in checkpoints}


def check_output(out: str | os.PathLike[str], inputs: Mapping[str, Path], *, force: bool) -> Path:
    """Return the real path of ``out``, after checking that a merge may write there.

    ``inputs`` are the inputs' real paths by what the user typed. Raises OutputError if ``out``
    is an input, lies inside one or holds one; if it is or holds the current or the home folder;
    if it is a mount point, which cannot be renamed; if it lies under a file; and if something
    is there already. An empty folder is fine, and with ``force`` a model's folder is too:
    nothing else is ever replaced.
    """
    if not os.fspath(out) or "\0" in os.fspath(out):
        raise OutputError(
            f"the output folder cannot be {os.fspath(out)!r}", hint="give a folder to make"
        )
    with os_errors(os.fspath(out), "found"):
        path = Path(os.path.realpath(os.path.expanduser(out)))
        _refuse_loop(path, out)
        _refuse_place_in_use(path, out)
    for label, source in inputs.items():
        if path == source or source in path.parents:
            raise OutputError(
                f"the output folder {out} is the input {label!r}, or lies inside it",
                hint="choose a folder outside the inputs",
            )
        for folder in (path, _partial_of(path)):
            if folder == source or folder in source.parents:
                raise OutputError(
                    f"the input {label!r} lies inside {folder}, which would be replaced",
                    hint="choose a folder that holds no input",
                )
    with os_errors(path, "read"):
        if os.path.ismount(path):
            raise OutputError(
                f"{out} is a mount point, which cannot be replaced by a finished folder",
                hint="choose a folder inside it",
            )
        existing = _existing_parent(path)
        if not existing.is_dir():
            raise OutputError(
                f"{out} would lie under {existing}, which is not a folder",
                hint="choose another folder",
            )
        _refuse_existing(path, out, force=force)
    return path


@contextmanager
def output_folder(out: Path, needed: int, *, force: bool) -> Iterator[Path]:
    """Yield a folder beside ``out`` to write into, and give it the name ``out`` at the end.

    ``out`` is a real path that passed the checks above; ``needed`` is its size in bytes. On any
    exception the folder is removed again, with the parents that were created for it; what
    stood at ``out`` before is removed only once the new folder has its name.
    Raises OutputError if another run is writing the same ``out``, CheckpointError if the disk
    has too little room or refuses.
    """
    _refuse_full_disk(out, needed)
    partial = _partial_of(out)
    created: list[Path] = []
    try:
        with os_errors(out.parent, "created"):
            _make_parents(out.parent, created)
        with os_errors(partial, needed=needed):
            lock = _lock(partial, out)
        try:
            with _removed_on_error(partial):
                with os_errors(partial):
                    _refuse_existing(out, out, force=force)
                    _clear(partial)
                yield partial
                with os_errors(out, needed=needed):
                    _sync_tree(partial)
                    # Once more: what has come there meanwhile is nobody's to replace either.
                    _refuse_existing(out, out, force=force)
                    replaced = _swap(partial, out)
            with os_errors(out):
                _settle(out, replaced)
        finally:
            os.close(lock)
    except BaseException:
        for folder in reversed(created):
            with suppress(OSError):
                folder.rmdir()
        raise


def _refuse_loop(path: Path, typed: str | os.PathLike[str]) -> None:
    # A real path holds no links, except where they lead back to themselves.
    if any(p.is_symlink() for p in (path, *path.parents)):
        raise OutputError(
            f"{typed} is a symbolic link that leads in a circle", hint="choose another name"
        )


def _refuse_place_in_use(path: Path, typed: str | os.PathLike[str]) -> None:
    for place, name in ((os.curdir, "current"), (os.path.expanduser("~"), "home")):
        try:
            folder = Path(os.path.realpath(place))
        except FileNotFoundError:  # somebody removed the current folder
            continue
        if path == folder or path in folder.parents:
            raise OutputError(
                f"{typed} is the {name} folder, or holds it, and is never replaced",
                hint="choose a folder of its own",
            )


def _refuse_existing(path: Path, typed: str | os.PathLike[str], *, force: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        kind = "is a file" if path.is_file() else "is neither a file nor a folder"
        raise OutputError(
            f"{typed} already exists and {kind}, which is never replaced",
            hint="choose another name",
        )
    if not any(path.iterdir()):
        return
    if not _is_model(path):
        raise OutputError(
            f"{typed} already exists, is not empty and does not look like a model, so it is not "
            "replaced",
            hint="choose another folder, or remove it first",
        )
    if not force:
        raise OutputError(
            f"{typed} already exists and is not empty",
            hint="choose another folder, or replace it whole with --force",
        )


def _is_model(folder: Path) -> bool:
    return any(
        p.name in _MODEL_FILES or p.suffix == ".safetensors"
        for p in folder.iterdir()
        if p.is_file()
    )


def _existing_parent(path: Path) -> Path:
    return next(p for p in path.parents if p.exists())


def _partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _refuse_full_disk(out: Path, needed: int) -> None:
    with os_errors(out):
        disk = os.statvfs(_existing_parent(out))
    if disk.f_flag & os.ST_RDONLY:
        raise CheckpointError(
            f"{out} could not be written: its file system is read-only",
            hint="write to another disk",
        )
    needed += _SLACK_BYTES
    free = disk.f_bavail * disk.f_frsize
    # Some network file systems do not know their size and say 0.
    if disk.f_blocks and free < needed:
        raise CheckpointError(
            f"{out} needs {needed:,} bytes and its disk has only {free:,} free",
            hint="free some space, or write to another disk",
        )


def _make_parents(folder: Path, created: list[Path]) -> None:
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for parent in reversed(missing):
        with suppress(FileExistsError):
            parent.mkdir()
            created.append(parent)


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _lock(partial: Path, out: Path) -> int:
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise OutputError(f"{partial} is in the way: the output is written there first")
    partial.mkdir(exist_ok=True)
    path = partial / LOCK_NAME
    if not path.exists() and any(partial.iterdir()):
        raise OutputError(
            f"{partial} is in the way and was not left by an earlier run",
            hint="move it away: the output is written there first",
        )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder may have published and unlinked the file between our open and our lock.
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        raise OutputError(
            f"another run is writing {out}", hint="wait for it, or choose another folder"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.name == LOCK_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync_tree(folder: Path) -> None:
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))


def _swap(partial: Path, out: Path) -> Path | None:
    """Rename ``partial`` to ``out``; return the folder that now holds what was there before."""
    aside: Path | None = None
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    try:
        if aside is not None:
            out.rename(aside / out.name)
        partial.rename(out)
    except BaseException:
        if aside is not None:
            if not out.exists():
                (aside / out.name).rename(out)
            with suppress(OSError):
                aside.rmdir()
        raise
    return aside


def _settle(out: Path, replaced: Path | None) -> None:
    # The lock goes only now: a run that found the folder unlocked would take it for a left-over.
    (out / LOCK_NAME).unlink()
    sync_folder(out)
    sync_folder(out.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
