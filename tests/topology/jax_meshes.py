"""podring's meshes against JAX's up to a full pod; ``python -m tests.topology.jax_meshes`` prints it all.

The measure is the model's predicted time of all-reduces along every axis, weighted by traffic (each axis four times the
one before it: JAX too takes the last axis for the hottest). One evaluator judges both meshes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax._src import mesh_utils
from podring import _core
from podring.mesh import rank_order

from tests.topology.devices import FakeDevice, fake_devices

BYTES = 64 << 20
TRAFFIC_STEP = 4.0


@dataclass(frozen=True)
class Comparison:
    """Predicted microseconds of both meshes of one shape; JAX's is None where it refuses."""

    name: str
    sizes: tuple[int, ...]
    dcn: tuple[int, ...] | None
    ours: float
    jax: float | None
    jax_splitting: float | None
    our_seconds: float
    jax_seconds: float


def cost(name: str, sizes: Sequence[int], ranks: Sequence[int]) -> float:
    """Weighted predicted time of a mesh."""
    judged = _core.topology_judge(name, None, sizes, ranks, BYTES)
    return sum(TRAFFIC_STEP**axis * micros for axis, (_, _, micros) in enumerate(judged))


def jax_ranks(
    devices: list[FakeDevice], sizes: Sequence[int], dcn: Sequence[int] | None, split: bool
) -> list[int] | None:
    """Ranks of JAX's mesh, or None if it refuses the shape."""
    try:
        if dcn is None:
            mesh = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
        else:
            inner = [size // factor for size, factor in zip(sizes, dcn, strict=True)]
            mesh = mesh_utils.create_hybrid_device_mesh(inner, dcn, devices, allow_split_physical_axes=split)
    except (NotImplementedError, ValueError, AssertionError, TypeError):  # TypeError: its splitting found nothing
        return None
    return [device.rank for device in mesh.flatten()]


def compare(name: str, sizes: tuple[int, ...], dcn: tuple[int, ...] | None = None) -> Comparison:
    """Both meshes of one shape."""
    devices = fake_devices(name)
    names = [f"a{axis}" for axis in range(len(sizes))]
    across = None if dcn is None else dict(zip(names, dcn, strict=True))
    started = time.perf_counter()
    ours = rank_order(sizes, names, slice=name, dcn=across, bytes=BYTES)
    our_seconds = time.perf_counter() - started
    started = time.perf_counter()
    whole = jax_ranks(devices, sizes, dcn, split=False)
    jax_seconds = time.perf_counter() - started
    split = jax_ranks(devices, sizes, dcn, split=True)
    return Comparison(
        name,
        sizes,
        dcn,
        cost(name, sizes, ours),
        None if whole is None else cost(name, sizes, whole),
        None if split is None else cost(name, sizes, split),
        our_seconds,
        jax_seconds,
    )


def factorings(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every mesh shape of so many axes, ones left out."""
    if axes == 1:
        if count > 1:
            yield (count,)
        return
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            for rest in factorings(count // first, axes - 1):
                yield (first, *rest)


SLICES = [
    "v2:2x2", "v2:4x4", "v2:16x16", "v3:2x2", "v3:8x8", "v3:32x32",
    "v5e:1x2", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16",
    "v6e:2x4", "v6e:4x4", "v6e:8x8", "v6e:16x16",
    "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x4x8_twisted", "v5p:4x8x8",
    "v5p:4x8x8_twisted", "v5p:8x8x8", "v5p:8x8x16", "v5p:8x16x16", "v5p:16x16x16", "v5p:16x16x24", "v5p:16x20x28",
    "tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:2x2x4", "tpu7x:2x4x4", "tpu7x:4x4x4", "tpu7x:4x4x8", "tpu7x:8x8x8",
    "tpu7x:16x16x16", "tpu7x:16x24x24",
]  # fmt: skip

HYBRIDS = [
    ("v5e:4x4*2", (2, 16), (2, 1)), ("v5e:4x4*2", (4, 8), (2, 1)), ("v5e:16x16*4", (4, 16, 16), (4, 1, 1)),
    ("v5e:16x16*4", (16, 64), (4, 1)), ("v5e:16x16*4", (64, 16), (4, 1)), ("v5p:4x4x4*2", (2, 4, 16), (2, 1, 1)),
    ("v5p:4x4x8*3", (12, 32), (3, 1)), ("v5p:8x8x8*2", (16, 64), (2, 1)), ("v6e:16x16*2", (2, 256), (2, 1)),
    ("tpu7x:4x4x4*2", (2, 128), (2, 1)), ("tpu7x:4x4x4*2", (32, 8), (2, 1)),
]  # fmt: skip


def cases(most_per_slice: int | None = None) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...] | None]]:
    """Slices with mesh shapes of one to three axes (all of them, or evenly picked), then several slices."""
    for name in SLICES:
        devices = len(_core.topology_devices(name))
        shapes = list(itertools.chain.from_iterable(factorings(devices, axes) for axes in (1, 2, 3)))
        if most_per_slice is not None and len(shapes) > most_per_slice:
            step = len(shapes) / most_per_slice
            shapes = [shapes[int(index * step)] for index in range(most_per_slice)]
        for shape in shapes:
            yield name, shape, None
    yield from HYBRIDS


def main() -> None:
    """Prints a line for each shape and the sums."""
    worse = refused = better = total = 0
    for name, sizes, dcn in cases(None if "--all" in sys.argv else 40):
        row = compare(name, sizes, dcn)
        total += 1
        best = min((value for value in (row.jax, row.jax_splitting) if value is not None), default=None)
        refused += row.jax is None
        worse += best is not None and row.ours > best * (1 + 1e-6)
        better += best is not None and row.ours < best * (1 - 1e-6)
        show = ["refuses" if value is None else f"{value:.0f}" for value in (row.jax, row.jax_splitting)]
        mark = " WORSE" if best is not None and row.ours > best * (1 + 1e-6) else ""
        shape = "x".join(map(str, sizes)) + ("" if dcn is None else f" dcn {'x'.join(map(str, dcn))}")
        print(
            f"{name:20} {shape:22} ours {row.ours:10.0f} us  JAX {show[0]:>10}  splitting {show[1]:>10}"
            f"  found in {row.our_seconds * 1e3:6.2f} ms, JAX {row.jax_seconds * 1e3:6.2f} ms{mark}"
        )
    print(f"{total} shapes: podring better on {better}, worse on {worse}; JAX without splitting refuses {refused}")


if __name__ == "__main__":
    main()
