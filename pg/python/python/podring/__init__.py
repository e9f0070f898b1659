"""podring: TPU collectives for PyTorch.

``torch.distributed.init_process_group("tpu")`` finds podring by itself; nothing here need be imported for that, and
nothing here imports torch.
"""

from podring._core import __version__

__all__ = ["__version__"]
