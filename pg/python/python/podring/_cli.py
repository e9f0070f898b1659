"""The ``podring`` command."""

import sys

from podring import _core


def main() -> int:
    """Runs the command line of this process; gives the exit code."""
    return _core.cli_main(sys.argv)
