"""podring: TPU collectives for PyTorch.

``torch.distributed.init_process_group("tpu")`` finds podring by itself; nothing here need be imported for that, and
importing this does not import torch. ``device_mesh`` and ``rank_order`` lay a mesh over a TPU slice.
"""

from podring._core import __version__
from podring.mesh import device_mesh, rank_order

__all__ = ["__version__", "device_mesh", "rank_order"]
