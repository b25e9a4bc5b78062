"""``completion``: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .options import output_options

COMPLETE_VARIABLE = "_MERGEKIT_ISO_COMPLETE"


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "fish", "powershell", "zsh"]))
@output_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  eval "$(mergekit-iso completion bash)"   in ~/.bashrc
    zsh:   eval "$(mergekit-iso completion zsh)"    in ~/.zshrc
    fish:  mergekit-iso completion fish > ~/.config/fish/completions/mergekit-iso.fish
    """
    program = ctx.find_root()
    complete = get_completion_class(shell)
    assert complete is not None
    script = complete(program.command, {}, str(program.info_name), COMPLETE_VARIABLE).source()
    ctx.obj.data(script, {"shell": shell, "script": script})
