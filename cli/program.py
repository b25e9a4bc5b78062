"""The program: its list of commands, and how one of them is run."""

from __future__ import annotations

import os
import warnings

import click
from click.shell_completion import shell_complete

from .completion import COMPLETE_VARIABLE, completion
from .demo import demo
from .env import env
from .errors import exit_code_of
from .merge import merge, plan
from .methods import methods
from .output import Output
from .verify import verify

PROGRAM = "mergekit-iso"


@click.group(name=PROGRAM)
@click.version_option(package_name="mergekit-iso", message="%(prog)s %(version)s")
def program() -> None:
    """Merge fine-tuned models that share a base.

    \b
    Try it:  mergekit-iso demo
    Merge:   mergekit-iso merge BASE MODEL MODEL --method iso_c -o OUT

    Exit codes: 0 done; 1 the answer is no (verify); 2 usage, or OUT is in use; 3 inputs missing,
    incompatible or corrupt, or disk, permission, network, memory; 4 a bug; 129, 130 and 143
    stopped by SIGHUP, SIGINT (Ctrl-C) and SIGTERM; 141 nobody reads standard output.
    """


for _command in (merge, plan, methods, verify, demo, env, completion):
    program.add_command(_command)


def run(arguments: list[str]) -> int:
    """Run a command line, or answer a shell that completes one; return the exit code."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        warnings.simplefilter("ignore")
        return shell_complete(program, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    output = Output()

    def run_command() -> int:
        with program.make_context(PROGRAM, list(arguments), obj=output) as ctx:
            return program.invoke(ctx) or 0

    return exit_code_of(run_command, arguments, output)
