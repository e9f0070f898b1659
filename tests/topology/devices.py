"""Devices as JAX sees them, made from podring's list, for JAX's mesh functions to arrange."""

from __future__ import annotations

from dataclasses import dataclass

from podring import _core

# What jax.devices()[0].device_kind says of each generation.
KINDS = {
    "v2": "TPU v2",
    "v3": "TPU v3",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5p",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}


@dataclass(frozen=True, eq=False)
class FakeDevice:
    """The attributes that jax.experimental.mesh_utils reads."""

    rank: int
    id: int
    coords: list[int]
    core_on_chip: int
    slice_index: int
    process_index: int
    device_kind: str
    platform: str = "tpu"


def fake_devices(name: str, topology: str | None = None) -> list[FakeDevice]:
    """The devices of a slice in libtpu's list order, which is rank order."""
    kind = KINDS[name.split(":")[0]]
    rows = _core.topology_devices(name, topology)
    return [
        FakeDevice(rank, number, coords, core, slice_index, process, kind)
        for rank, (number, coords, core, slice_index, process) in enumerate(rows)
    ]
