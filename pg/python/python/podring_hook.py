"""What ``import torch`` calls (the entry-point group ``torch.backends``), apart from the package ``podring``: importing
that loads the core, which nobody shall pay for who has neither torch_tpu nor a virtual slice.
"""

from __future__ import annotations

import os
from importlib.util import find_spec


def load() -> None:
    """Goes on to ``podring._hook`` where there is something to do. Never raises."""
    if (os.environ.get("PODRING_SLICE") or "").strip() or find_spec("torch_tpu") is not None:
        try:
            from podring import _hook
        except ImportError:
            # A core that can't be loaded: init_process_group("tpu") imports it too, and raises what is wrong with it.
            return
        _hook.load()
