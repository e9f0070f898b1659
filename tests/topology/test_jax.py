"""podring's meshes are never worse than JAX's, and shapes that JAX refuses are solved."""

from __future__ import annotations

import pytest
from podring import _core
from podring.mesh import rank_order

from tests.topology import jax_meshes


def test_never_worse_than_jax() -> None:
    compared = 0
    for name, sizes, dcn in jax_meshes.cases(most_per_slice=12):
        row = jax_meshes.compare(name, sizes, dcn)
        for theirs in (row.jax, row.jax_splitting):
            if theirs is not None:
                compared += 1
                assert row.ours <= theirs * (1 + 1e-6), row
    assert compared > 300


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v5p:4x4x4", (8, 8)),
        ("v5p:8x8x8", (32, 16)),
        ("v5e:16x16", (64, 4)),
        ("v5p:4x4x8", (2, 64)),
        ("tpu7x:16x24x24", (96, 192)),
    ],
)
def test_shapes_that_jax_refuses(name: str, sizes: tuple[int, ...]) -> None:
    row = jax_meshes.compare(name, sizes)
    assert row.jax is None
    ranks = rank_order(sizes, slice=name)
    assert sorted(ranks) == list(range(len(_core.topology_devices(name))))
