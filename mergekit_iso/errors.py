"""The errors users see: one sentence each, with the way out kept apart as a hint."""

from __future__ import annotations


class MergekitIsoError(Exception):
    """Base of every error this library raises on purpose.

    ``str(error)`` is one sentence that says what is wrong and names the file or tensor,
    ``error.hint`` says what to do about it, or is None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class MethodError(MergekitIsoError):
    """A method, option or weight that does not exist, is out of range or does not fit."""


class RecipeError(MergekitIsoError):
    """A recipe that cannot be read as one."""


class OutputError(MergekitIsoError):
    """An output folder that is in use, or lies where it would harm an input."""


class CheckpointError(MergekitIsoError):
    """A checkpoint that is missing, unreadable, corrupt or of a kind that is not merged."""


class IncompatibleError(MergekitIsoError):
    """Models that do not belong together: other tensors, shapes or vocabularies."""


class NonFiniteError(MergekitIsoError):
    """A NaN or an infinity, in an input or about to be written."""


class SyncError(MergekitIsoError):
    """An outer step that could not be completed; the anchor has been restored."""


class MergeWarning(UserWarning):
    """Something that is no error and that the user should nevertheless know."""
