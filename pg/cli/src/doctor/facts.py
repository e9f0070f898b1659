"""Prints what `podring doctor` wants to know of a Python installation, as one JSON object. Imports nothing big."""

import glob
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys


def version(package):
    try:
        return importlib.metadata.version(package)
    except Exception:
        return None


def folders(module):
    try:
        spec = importlib.util.find_spec(module)
    except Exception:
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def faces(folder):
    """The compiled faces, _face_MAJOR_MINOR after the torch they were built against."""
    found = []
    for path in sorted(glob.glob(os.path.join(folder, "_face_*.so"))):
        name = os.path.basename(path)
        minor = re.match(r"_face_(\d+)_(\d+)\.", name)
        fits = any(name == name.split(".")[0] + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES)
        found.append({"path": path, "torch": f"{minor[1]}.{minor[2]}" if minor else None, "loads_here": fits})
    return found


def entry_points():
    try:
        found = importlib.metadata.entry_points(group="torch.distributed.backends")
        return [entry.value for entry in found if entry.name == "tpu"]
    except Exception:
        return []


podring = folders("podring")
plugins = {}
for module in ("libtpu", "xla_cpu_pjrt", "lammps_jax_pjrt_cpu"):
    for folder in folders(module):
        pattern = "libtpu.so" if module == "libtpu" else "**/*pjrt*.so*"
        for path in sorted(glob.glob(os.path.join(folder, pattern), recursive=True)):
            plugins[path] = module
print(
    json.dumps(
        {
            "executable": sys.executable,
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "bits": 64 if sys.maxsize > 2**32 else 32,
            "torch": version("torch"),
            "torch_found": bool(folders("torch")),
            "numpy": version("numpy"),
            "torch_tpu": version("torch_tpu"),
            "podring": version("podring"),
            "podring_folders": podring,
            "core": [path for folder in podring for path in glob.glob(os.path.join(folder, "_core*.so"))],
            "faces": [face for folder in folders("podring_torch") for face in faces(folder)],
            "entry_points": entry_points(),
            "plugins": plugins,
        }
    )
)
