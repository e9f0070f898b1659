"""podring's c10d face. One compiled module per torch minor version: ``_face_2_15`` is for torch 2.15.

c10d has no stable binary interface, so a face must meet exactly the torch it was built for. Nothing is imported here;
``podring._register`` picks the module.
"""

from __future__ import annotations

import importlib
import os
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    import torch
    from torch._C._distributed_c10d import Backend, ReduceOp, Store, _DistributedBackendOptions

_PREFIX = "_face_"


if TYPE_CHECKING:
    # Only then: making a Protocol takes a third of a millisecond of init_process_group.
    class RendezvousStore(Store):
        """The compiled module's ``Store``, for type checkers: the coordinator's key-value store."""

        host: str
        port: int
        instance: int
        serves: bool

    class Face(Protocol):
        """What the compiled module offers."""

        torch_version: str
        TpuBackend: type[Backend]

        def create(
            self, opts: _DistributedBackendOptions, backend_options: Backend.Options | None = None, name: str = "tpu"
        ) -> Backend: ...

        def set_torch_tpu(self, version: str) -> None: ...

        def lend_world(self, backend: Backend) -> None: ...

        def ordered_store(self, store: Store) -> Store: ...

        def warm_up(self, backend: Backend, calls: Sequence[tuple[int, torch.dtype, ReduceOp, int]]) -> int: ...

        def drain(self, timeout: float) -> bool: ...

        def store(
            self,
            *,
            host: str,
            port: int,
            timeout: float,
            serve: int,
            insecure: bool,
            token: str,
            token_file: str,
            tls_ca: str,
            tls_cert: str,
            tls_key: str,
            server_name: str,
            state_dir: str,
        ) -> RendezvousStore: ...


def minors() -> list[str]:
    """The torch minor versions that faces are installed for, such as ``["2.15"]``."""
    found = set()
    # Not by a pattern: the first one of a process costs a millisecond of init_process_group.
    for name in os.listdir(os.path.dirname(__file__)):
        if name.startswith(_PREFIX) and name.endswith(tuple(EXTENSION_SUFFIXES)):
            found.add(name.removeprefix(_PREFIX).split(".")[0].replace("_", "."))
    return sorted(found)


def load(minor: str) -> Face:
    """The face for a torch minor version that ``minors()`` has. The running torch must be of that version."""
    return cast("Face", importlib.import_module(f"{__name__}.{_PREFIX}{minor.replace('.', '_')}"))
