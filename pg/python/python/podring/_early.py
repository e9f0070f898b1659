"""Names podring's interposer as the PJRT plugin that torch_tpu is to load, before anything loads one.

torch_tpu (0.2.0) reads TPU_LIBRARY_PATH once, when its first extension module is loaded, which is when it is imported;
so this has to come before, and neither torch nor torch_tpu may be imported here. It is called by ``podring_slice.pth``
when the interpreter starts with PODRING_SLICE set, and again by the ``torch.backends`` hook. Whether the chips are
virtual or a TPU's is decided here.
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


def tpu_devices(root: Path = Path("/")) -> int:
    """How many TPU devices this host has: PODRING_TPU_DEVICES, else Google's PCI devices that a driver's file leads to.

    VFIO has a file for each; the older driver's files are counted by themselves.
    """
    if said := os.environ.get("PODRING_TPU_DEVICES", "").strip():
        if not said.isascii() or not said.isdigit():
            raise ValueError(f"PODRING_TPU_DEVICES={said}: expected how many TPU devices this host has, 0 for none")
        return int(said)
    found = [device for device in (root / "sys/bus/pci/devices").glob("*") if _is_googles(device)]
    if not found:
        return 0
    groups = [root / "dev/vfio" / group for device in found if (group := _iommu_group(device)) is not None]
    return sum(group.exists() for group in groups) or len(list((root / "dev").glob("accel[0-9]*")))


def _is_googles(device: Path) -> bool:
    try:
        return (device / "vendor").read_text().strip() == "0x1ae0"
    except OSError:
        return False


def _iommu_group(device: Path) -> str | None:
    try:
        return (device / "iommu_group").readlink().name
    except OSError:
        return None


def tpu_here() -> bool:
    """Whether this machine has a TPU that a process can open."""
    return tpu_devices() > 0


def libtpu() -> Path | None:
    """libtpu's file: PODRING_LIBTPU, else TPU_LIBRARY_PATH if that isn't podring's own, else the package's."""
    if named := os.environ.get("PODRING_LIBTPU"):
        return Path(named)
    if (given := os.environ.get("TPU_LIBRARY_PATH")) and Path(given).resolve() != interposer():
        return Path(given)
    spec = importlib.util.find_spec("libtpu")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder, "libtpu.so")).is_file():
            return path
    return None


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
    """Makes TPU_LIBRARY_PATH name podring's interposer, and says in the environment what that is to wrap.

    On a virtual slice only where it isn't set: who names another plugin there is told so. On a TPU host libtpu is
    named, by its user or by an image, and is what is wrapped.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        explain_errors()
        return
    core = interposer()
    if core is None:
        return
    if tpu_here():
        if (wrapped := libtpu()) is not None:
            os.environ["PODRING_LIBTPU"] = str(wrapped)
            os.environ["TPU_LIBRARY_PATH"] = str(core)
    elif (plugin := cpu_plugin()) is not None:
        # The interposer would take it for a TPU host's.
        os.environ.pop("PODRING_LIBTPU", None)
        os.environ.setdefault("TPU_LIBRARY_PATH", str(core))
        os.environ.setdefault("PODRING_PJRT_PLUGIN", str(plugin))
