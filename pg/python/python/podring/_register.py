"""Makes ``"tpu"`` known to ``torch.distributed``.

Where ``podring_hook`` hasn't, torch calls ``register`` (an entry point of the group ``torch.distributed.backends``) the
first time a process group named "tpu" is asked for. Either way torch is imported long before this module, and errors
here are errors of ``init_process_group``, never of ``import torch``.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from podring_torch import Face
    from torch._C._distributed_c10d import Backend as C10dBackend

# Seconds that the interpreter's end may be held up by callbacks that still run.
_DRAIN_SECONDS = 5.0


def register(name: str = "tpu") -> None:
    """Registers podring as the c10d backend ``name``: for CPU tensors, and TPU tensors where there is that device."""
    devices = ["cpu"]
    if torch._C._get_privateuse1_backend_name() == "tpu":
        devices.append("tpu")
    dist.Backend.register_backend(name, functools.partial(_create, name), extended_api=True, devices=devices)


def torch_minor(version: str) -> str:
    """The minor version within a torch version: ``"2.15"`` for ``"2.15.0+cpu"``."""
    return ".".join(version.split("+")[0].split(".")[:2])


@functools.cache
def face() -> Face:
    """The compiled face for the running torch.

    Raises ``RuntimeError`` if there is none: c10d's binary interface changes with torch's minor version, and a face
    built for another one would call the wrong functions.
    """
    minor = torch_minor(torch.__version__)
    try:
        import podring_torch
    except ModuleNotFoundError as missing:
        raise RuntimeError(
            f"podring has no face for torch {torch.__version__}: the package podring-torch is not installed. "
            "Build it against this torch with: pip install --no-build-isolation --no-deps ./pg/torch"
        ) from missing
    minors = podring_torch.minors()
    if minor not in minors:
        raise RuntimeError(
            f"podring has no face for torch {torch.__version__}, only for torch {', '.join(minors) or '(none)'}. "
            "Build it against this torch with: pip install --no-build-isolation --no-deps ./pg/torch"
        )
    loaded = podring_torch.load(minor)
    # Whether tensors' memory can be used as it is depends on how torch_tpu's objects are laid out.
    loaded.set_torch_tpu(_torch_tpu_version() or "(absent)")
    atexit.register(_drain, loaded, os.getpid())
    return loaded


def _torch_tpu_version() -> str | None:
    # Most often there is none, and reading all packages' metadata for that takes its time.
    if find_spec("torch_tpu") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch_tpu")
    except PackageNotFoundError:
        return None


def _drain(loaded: Face, pid: int) -> None:
    # A forked child has none of the threads to wait for.
    if os.getpid() == pid:
        loaded.drain(_DRAIN_SECONDS)


def _wake_chip() -> None:
    """Collectives that are programs run on torch_tpu's client, which torch_tpu (0.2.0) makes with its first tensor."""
    from podring import _core

    if torch._C._get_privateuse1_backend_name() == "tpu" and _core.engine() == "ici":
        torch.empty(1, device="tpu").cpu()


# The two are c10d's: its extended API gives (_DistributedBackendOptions, pg_options).
def _create(name: str, opts: Any, backend_options: object | None) -> C10dBackend:
    from torch._C._distributed_c10d import Backend

    # Where there is neither a virtual slice nor torch_tpu nobody has imported it, and it would have nothing to say.
    hooked = "podring._hook" in sys.modules or bool(os.environ.get("PODRING_SLICE"))
    if hooked:
        from podring import _hook

        _hook.raise_kept()
        _hook.explain_absence()
    _wake_chip()
    if backend_options is not None and type(backend_options) is not Backend.Options:
        raise TypeError(
            f'the backend "{name}" takes pg_options of type torch.distributed.Backend.Options or None, '
            f"got {type(backend_options).__qualname__}"
        )
    backend = face().create(opts, backend_options, name)
    # The first group is the default group, of all ranks: programs' collectives run over groups made of it.
    if hooked and not dist.is_initialized() and _hook.on_virtual_slice():
        face().lend_world(backend)
    return backend
