"""Asks libtpu what slices look like; no TPU is needed, libtpu describes slices that it doesn't have.

``python -m tests.topology.libtpu_devices`` reads questions, a JSON line each, [NAME, OPTIONS], and
answers each: {"devices": [[id, [x, y, z], core, slice, process], …]}, {"error": text} or {"died": wait status}.
Every question is put in a child process of its own: libtpu aborts on some of them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def describe(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The devices of a slice in libtpu's list order, or its refusal."""
    from jax.experimental import topologies

    devices: Any  # JAX types them too loosely.
    try:
        devices = topologies.get_topology_desc(name, platform="tpu", **options).devices
    except Exception as error:
        return {"error": str(error)}
    return {
        "devices": [
            # A lone slice's devices have no slice_index.
            [d.id, list(d.coords), d.core_on_chip, getattr(d, "slice_index", 0), d.process_index]
            for d in devices
        ]
    }


def main() -> None:
    """Answers standard input."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # libtpu lets one process at a time have a machine's TPUs; describing slices takes none.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    import jax.experimental.topologies  # noqa: F401  Loaded once, before the children.

    for line in sys.stdin:
        name, options = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(describe(name, options)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(json.dumps({"died": status}), flush=True)


if __name__ == "__main__":
    main()
