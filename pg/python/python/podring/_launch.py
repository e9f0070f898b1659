"""torch's launcher as ``podring run`` starts it: in this process, which runs no rank, no device is brought up."""

from __future__ import annotations

import os
import sys

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def main() -> None:
    """``python -m podring._launch ARGUMENTS``: as ``torchrun ARGUMENTS``."""
    given = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    import torch  # noqa: F401

    # The ranks do load it, unless the caller had it switched off.
    if given is None:
        del os.environ[AUTOLOAD]
    else:
        os.environ[AUTOLOAD] = given
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
