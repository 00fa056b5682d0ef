"""The commands kvserver and kvctl that the wheel installs: they run the programs that it carries."""

import os
import pathlib
import sys
from typing import NoReturn


def _run(name: str) -> NoReturn:
    program = pathlib.Path(__file__).resolve().parent / "bin" / name
    try:
        os.execv(program, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: {program}: {error.strerror}")


def kvserver() -> NoReturn:
    """Runs kvserver with this process's arguments, in its place."""
    _run("kvserver")


def kvctl() -> NoReturn:
    """Runs kvctl with this process's arguments, in its place."""
    _run("kvctl")
