"""Names podring's interposer as the PJRT plugin that torch_tpu is to load, before anything loads one.

torch_tpu (0.2.0) reads TPU_LIBRARY_PATH once, when its first extension module is loaded, which is when it is imported;
so this has to come before, and neither torch nor torch_tpu may be imported here. It is called by ``podring_slice.pth``
when the interpreter starts with PODRING_SLICE set, and again by the ``torch.backends`` hook.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import TracebackType

_CPU_PLUGINS = (
    ("lammps_jax_pjrt_cpu", "pjrt_c_api_cpu_plugin.so"),
    ("xla_plugins.xla_cpu_pjrt", "xla_cpu_pjrt.so"),
)
"""XLA's CPU plugin as packages ship it, the newer interface first."""


def interposer() -> Path | None:
    """The real path of podring's core, which exports GetPjrtApi."""
    found = sorted(Path(__file__).resolve().parent.glob("_core*.so"))
    return found[0].resolve() if found else None


def cpu_plugin() -> Path | None:
    """XLA's CPU plugin: PODRING_PJRT_PLUGIN, else the first package that has one."""
    if named := os.environ.get("PODRING_PJRT_PLUGIN"):
        return Path(named)
    for package, file in _CPU_PLUGINS:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            if (path := Path(folder, file)).is_file():
                return path
    return None


def tpu_here() -> bool:
    """Whether this machine has a TPU that a process can open: a PCI device of Google's, and a driver's file for it."""
    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").is_dir():
        return False
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == "0x1ae0":
                return True
        except OSError:
            continue
    return False


NO_DEVICE = (
    "PODRING_SLICE is set, but TORCH_DEVICE_BACKEND_AUTOLOAD=0 kept torch from loading torch_tpu and podring's virtual "
    "slice: there is no device 'tpu' in this process, and tensors can't be made on it. CPU tensors work. Unset "
    "TORCH_DEVICE_BACKEND_AUTOLOAD for virtual chips."
)


def explain_errors() -> None:
    """Without torch's autoload "tpu" is no device's name to torch, whose error can't say why: a note does, where that
    error ends the program. (Giving torch the name alone would make "tpu" the accelerator that FSDP2 and others choose.)
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, (RuntimeError, AttributeError)) and "tpu" in str(error):
            error.add_note(f"podring: {NO_DEVICE}")
        before(kind, error, traceback)

    sys.excepthook = hook


def arrange() -> None:
    """Sets TPU_LIBRARY_PATH and PODRING_PJRT_PLUGIN for a virtual slice where they are not set.

    Does nothing on a TPU host: there the chips are real.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        explain_errors()
        return
    core, plugin = interposer(), cpu_plugin()
    if core is not None and plugin is not None and not tpu_here():
        os.environ.setdefault("TPU_LIBRARY_PATH", str(core))
        os.environ.setdefault("PODRING_PJRT_PLUGIN", str(plugin))
