"""The ``podring`` command."""

import signal
import sys

from podring import _core


def main() -> int:
    """Runs the command line of this process; gives the exit code."""
    # The command runs outside the interpreter, which would only note a Ctrl-C and wait.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # doctor looks into, bench and run start, the Python that this script belongs to.
    return _core.cli_main(sys.argv, sys.executable)
