"""What to do about a command line that cannot be understood."""

from __future__ import annotations

from collections.abc import Sequence

import click


def usage_hint(error: click.UsageError, arguments: Sequence[str]) -> str:
    """Return the way out of a usage error; ``arguments`` are those of the command line."""
    see = f"see {error.ctx.command_path if error.ctx else 'mergekit-iso'} --help"
    if isinstance(error, click.NoSuchOption):
        return (
            _only_merge(error)
            or _method_option(error, arguments)
            or _near(error.possibilities, see)
        )
    if isinstance(error, click.NoSuchCommand):
        return _near(error.possibilities, see)
    return see


def _near(possibilities: Sequence[str] | None, see: str) -> str:
    return f"did you mean {possibilities[0]}? {see}" if possibilities else see


def _only_merge(error: click.NoSuchOption) -> str | None:
    from .merge import merge

    if _command(error) == "plan" and any(error.option_name in p.opts for p in merge.params):
        return f"plan writes nothing: {error.option_name} is an option of merge"
    return None


def _method_option(error: click.NoSuchOption, arguments: Sequence[str]) -> str | None:
    if _command(error) not in ("merge", "plan"):
        return None
    from ..methods import list_methods

    option = error.option_name.lstrip("-").replace("-", "_")
    takers = [entry.name for entry in list_methods() if option in entry.defaults]
    if not takers:
        return None
    setting = f"--set {option}={_value(error.option_name, arguments) or 'VALUE'}"
    if _value("--method", arguments) in takers:
        return f"an option of the method: did you mean {setting}?"
    return f"{setting} sets it, an option of {', '.join(takers)}"


def _command(error: click.UsageError) -> str | None:
    return error.ctx.command.name if error.ctx else None


def _value(option: str, arguments: Sequence[str]) -> str | None:
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else following
    return None
