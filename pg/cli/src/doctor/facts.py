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


def face(folder):
    """Extensions of podring's other than the core, and the torch minor in each one's name (…2_15… or …215…)."""
    found = []
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    for path in sorted(glob.glob(os.path.join(folder, "*.so"))):
        name = os.path.basename(path)
        stem = name.split(".")[0]
        if stem == "_core":
            continue
        minor = re.search(r"(\d)_?(\d\d)(?!\d)", stem)
        found.append(
            {
                "path": path,
                "torch": f"{minor[1]}.{minor[2]}" if minor else None,
                "loads_here": name.endswith(suffix) or ".abi3." in name,
            }
        )
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
            "faces": [entry for folder in podring for entry in face(folder)],
            "entry_points": entry_points(),
            "plugins": plugins,
        }
    )
)
