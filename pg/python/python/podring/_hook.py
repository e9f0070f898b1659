"""What ``import torch`` calls, through ``podring_hook``, where there is a virtual slice or torch_tpu.

Where there is something to do, a virtual slice (PODRING_SLICE) or torch_tpu on a TPU, it lets torch_tpu load, brings
the device "tpu" up, and registers podring for CPU and TPU tensors. A hook that raises would break ``import torch``, so
whatever goes wrong is kept and raised by ``init_process_group("tpu")``.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Any

_kept: list[Exception] = []
_done: list[bool] = []
_virtual: list[bool] = []


def load() -> None:
    """The entry point. Never raises."""
    if _done:
        return
    _done.append(True)
    try:
        _load()
    except Exception as error:
        _kept.append(error)


def raise_kept() -> None:
    """Raises what went wrong while torch was imported, if anything did."""
    if _kept:
        raise RuntimeError(f"podring could not bring up the device 'tpu': {_kept[0]}") from _kept[0]


def explain_absence() -> None:
    """Warns, once, if a virtual slice was asked for and torch was kept from loading it."""
    if wanted_slice() is not None and not _done:
        _done.append(True)
        from podring import _early

        warnings.warn(_early.NO_DEVICE, stacklevel=3)


def on_virtual_slice() -> bool:
    """Whether this process holds a chip of a virtual slice."""
    return _virtual[:1] == [True]


def wanted_slice() -> str | None:
    """PODRING_SLICE, if it is set."""
    return (os.environ.get("PODRING_SLICE") or "").strip() or None


def disabled() -> bool:
    """PODRING_DISABLE=1: torch_tpu's own backend stays in place."""
    return os.environ.get("PODRING_DISABLE", "0") not in ("", "0")


def _load() -> None:
    name = wanted_slice()
    if name is None and find_spec("torch_tpu") is None:
        return
    from podring import _early

    here = _early.tpu_here()
    if not here and name is None:
        return
    if find_spec("torch_tpu") is None:
        raise RuntimeError(f"PODRING_SLICE={name} needs the package torch_tpu, which is not installed")
    if here:
        _load_on_tpu()
    elif name is not None:
        _load_virtual(name)


def _load_on_tpu() -> None:
    from podring import _core, _early, _edge

    if (libtpu := _early.libtpu()) is not None:
        _early.arrange()
        _core.interpose(str(libtpu), None)
    loader = _loaded()
    if not loader._LOADED:
        warnings.warn(
            "podring finds a TPU on this host, and torch_tpu none that it can use: there is no device 'tpu' in this "
            "process. CPU tensors work. torch_tpu looks for Google's PCI devices with a file in /dev/vfio",
            stacklevel=1,
        )
        return
    # First: torch_tpu has registered "tpu" for itself by now, and wouldn't raise what is kept.
    _edge.after_start()
    _register(virtual=False)
    loaded, why = _core.interposed()
    if why is not None:
        raise RuntimeError(why)
    if not loaded:
        # torch_tpu has a libtpu of its own choice: everything works, but slowly.
        reason = "no libtpu is installed" if libtpu is None else "torch_tpu came before podring could wrap libtpu"
        warnings.warn(
            f"podring doesn't share torch_tpu's TPU client, since {reason}: collectives of tpu tensors go through "
            "host memory and the hosts' network, and PODRING_ENGINE=ici can't be had. Start with `podring run`, or set "
            "PODRING_SLICE to the slice's name, or TPU_LIBRARY_PATH to podring's "
            f"{_early.interposer()} and PODRING_LIBTPU to libtpu's file",
            stacklevel=1,
        )
    _edge.before_start_on_tpu()


def _load_virtual(name: str) -> None:
    from podring import _core, _early, _edge

    _interpose_slice(name)
    loader = _loaded()
    # Asked for when torch_tpu was imported. If it asked another plugin there shall be no device: that plugin would look
    # for chips.
    loaded, why = _core.interposed()
    if why is not None:
        raise RuntimeError(why)
    if not loaded:
        raise RuntimeError(
            f"torch_tpu loaded {os.environ.get('TPU_LIBRARY_PATH')} as its PJRT plugin instead of podring's "
            f"{_early.interposer()}. Start with `podring run`, or set TPU_LIBRARY_PATH to the latter"
        )
    _edge.before_start_on_virtual_slice(name)
    # load() looks for hardware; there is none, but a device there is.
    loader._init_device("tpu")
    loader._LOADED = True
    _edge.after_start_on_virtual_slice(name)
    _edge.after_start()
    _virtual.append(True)
    _register(virtual=True)


def _loaded() -> Any:
    import torch_tpu._loader as loader

    loader.load()
    return loader


def _register(virtual: bool) -> None:
    import torch.distributed as dist

    from podring import _edge, _register

    if not dist.is_available():
        return
    if disabled():
        if virtual:
            _edge.for_their_backend()
        return
    _edge.for_our_backend()
    _register.register()
    dist.Backend.default_device_backend_map["tpu"] = "tpu"


def _interpose_slice(name: str) -> None:
    from podring import _core, _early

    plugin = _early.cpu_plugin()
    if plugin is None:
        raise RuntimeError(
            f"PODRING_SLICE={name} needs XLA's CPU plugin: install lammps_jax_pjrt_cpu or xla_cpu_pjrt, or name a file "
            "with PODRING_PJRT_PLUGIN"
        )
    _early.arrange()
    # First of all, so that a wrong name is reported as such and nothing has been loaded yet.
    _core.interpose(str(plugin), name)
