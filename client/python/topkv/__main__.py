"""`python -m topkv COMMAND`."""

import sys

from . import doctor
from ._version import __version__

_USAGE = """Usage: python -m topkv COMMAND

  doctor     check this installation, this machine and a node
  --version  print the version
"""


def main() -> int:
    """Runs the command of the command line; returns the exit status."""
    command, rest = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if command == "doctor":
        return doctor.main(rest)
    if command == "--version":
        print(f"topkv {__version__}")
        return 0
    if command in ("--help", "-h"):
        print(_USAGE, end="")
        return 0
    print(_USAGE, end="", file=sys.stderr)
    return 2


sys.exit(main())
