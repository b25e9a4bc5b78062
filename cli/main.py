"""The program's entry point and its list of commands."""

from __future__ import annotations

import io
import os
import sys

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
    incompatible or corrupt, or disk, permission, network, memory; 4 a bug; 130 and 143 interrupted.
    """


for _command in (merge, plan, methods, verify, demo, env, completion):
    program.add_command(_command)


def main() -> None:
    """Run the program with the process's arguments and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        sys.exit(shell_complete(program, {}, PROGRAM, COMPLETE_VARIABLE, instruction))
    output = Output()

    def run() -> int:
        with program.make_context(PROGRAM, sys.argv[1:], obj=output) as ctx:
            return program.invoke(ctx) or 0

    sys.exit(exit_code_of(run, output))
