"""podring: TPU collectives for PyTorch.

``torch.distributed.init_process_group("tpu")`` finds podring by itself; nothing here need be imported for that, and
importing this does not import torch. ``device_mesh`` and ``rank_order`` lay a mesh over a TPU slice; ``Store`` is a
client of a coordinator's key-value store; ``warm_up`` compiles the programs of collectives to come.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podring._core import __version__
    from podring.mesh import device_mesh, rank_order
    from podring.store import Store
    from podring.warm import warm_up

__all__ = ["Store", "__version__", "device_mesh", "rank_order", "warm_up"]

# `import torch` of a worker of torchrun imports this package: what costs time, or can fail, is imported when asked for.
_HOMES = {
    "Store": "podring.store",
    "__version__": "podring._core",
    "device_mesh": "podring.mesh",
    "rank_order": "podring.mesh",
    "warm_up": "podring.warm",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
