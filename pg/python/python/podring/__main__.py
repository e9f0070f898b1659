"""``python -m podring``: the ``podring`` command by this interpreter."""

import sys

from podring._cli import main

sys.exit(main())
