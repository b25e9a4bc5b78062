"""From what a user typed to a folder or file on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .files import LEFT_OVERS, OTHER_WEIGHTS

_HINT = "give a folder, a .safetensors file or a hub id such as org/name or org/name@revision"

_PICKLED = ("*.bin", "*.pt", "*.pth")
# Second copies of the weights that no index names, and weights of other programs.
_NOT_NEEDED = (
    "consolidated*.safetensors",
    "original/*",
    "onnx/*",
    "openvino/*",
    "*/*.safetensors",
    *(f"{name}/*" for name in LEFT_OVERS),
    *LEFT_OVERS,
)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies: ``path`` is a folder or a file, ``commit`` the hub's, if any."""

    label: str
    path: Path
    commit: str | None


def locate(reference: str | os.PathLike[str], *, allow_pickle: bool = False) -> Source:
    """Return where ``reference`` lies, downloading a hub id's snapshot first.

    A path object, a path that exists and a string that looks like a path (absolute, starting
    with ``.`` or ``~``, more than one slash, ending with a separator or ``.safetensors``) never
    go to the hub; a leading ``~`` is expanded. Of a snapshot only safetensors and the small
    files are fetched; pickled weights only where ``allow_pickle`` is set and there are no others.

    Raises:
        CheckpointError: nothing is there, or the hub did not give it.
    """
    label = os.fspath(reference)
    local = os.path.expanduser(label)
    if os.path.isdir(local) or os.path.isfile(local):
        return Source(label, Path(local), None)
    if os.path.exists(local):
        raise CheckpointError(f"{label!r} is not a folder or a .safetensors file", hint=_HINT)
    repository, _, revision = label.partition("@")
    if isinstance(reference, os.PathLike) or _looks_like_path(label, repository):
        raise CheckpointError(f"{label!r} does not exist", hint=_HINT)
    if repository.count("/") != 1:
        raise CheckpointError(
            f"{label!r} is neither a path that exists nor a hub id of the form org/name",
            hint=f"{_HINT}; a hub id names the owner too: openai-community/gpt2, not gpt2",
        )
    folder = _download(label, repository, revision or None, allow_pickle)
    return Source(label, folder, folder.name if folder.parent.name == "snapshots" else None)


def _looks_like_path(label: str, repository: str) -> bool:
    return (
        os.path.isabs(label)
        or label.startswith((".", "~"))
        or repository.count("/") > 1
        or "\\" in label
        or label.endswith(("/", ".safetensors"))
    )


def _download(label: str, repository: str, revision: str | None, allow_pickle: bool) -> Path:
    # Imported here: a merge of local folders needs neither the hub's client nor its network stack.
    import httpx2
    from huggingface_hub import errors, snapshot_download

    def snapshot(ignored: tuple[str, ...]) -> Path:
        return Path(snapshot_download(repository, revision=revision, ignore_patterns=list(ignored)))

    try:
        folder = snapshot((*OTHER_WEIGHTS, *_NOT_NEEDED))
        if allow_pickle and not any(folder.glob("*.safetensors")):
            others = tuple(p for p in OTHER_WEIGHTS if p not in _PICKLED)
            folder = snapshot((*others, *_NOT_NEEDED))
    except errors.HFValidationError:
        raise CheckpointError(
            f"{label!r} is neither a path that exists nor a hub id", hint=_HINT
        ) from None
    except errors.GatedRepoError:
        raise CheckpointError(
            f"the hub's model {label!r} is gated and this login has no access to it",
            hint="accept its conditions on its page, then log in with `hf auth login`",
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"the hub has no model {label!r}, or it is private, and no such path exists here",
            hint=f"check the spelling, log in with `hf auth login`, or give a folder as ./{label}",
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"the hub's model {repository!r} has no revision {revision!r}",
            hint="give a branch, a tag or a commit after the @",
        ) from None
    except errors.LocalEntryNotFoundError:
        raise CheckpointError(
            f"{label!r} is not completely in the local hub cache and the hub cannot be reached",
            hint="check the network and HF_HUB_OFFLINE, or give a local folder",
        ) from None
    except (errors.HfHubHTTPError, httpx2.HTTPError, errors.XetDownloadError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"status {status}" if status else type(error).__name__
        raise CheckpointError(
            f"the hub's model {label!r} could not be downloaded ({reason})",
            hint="try again later; what has been fetched is kept",
        ) from None
    wanted = ("*.safetensors", *_PICKLED) if allow_pickle else ("*.safetensors",)
    if not any(path for pattern in wanted for path in folder.glob(pattern)):
        raise CheckpointError(
            f"the hub's model {label!r} has no weights in {wanted[0]} files",
            hint=None if allow_pickle else "if it has pickled ones, admit them with --allow-pickle",
        )
    return folder
