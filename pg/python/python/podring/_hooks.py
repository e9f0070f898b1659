"""What ``import torch`` calls (an entry point of the group ``torch.backends``). Light, and never an error of its own:
one would be an error of ``import torch``.
"""

from __future__ import annotations

import logging


def autoload() -> None:
    """Makes ``init_method="tpu://host:port"`` known."""
    try:
        from podring import rendezvous

        rendezvous.register()
    except Exception:
        logging.getLogger(__name__).warning("podring can't register tpu://", exc_info=True)
