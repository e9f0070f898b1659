"""The worlds that this folder's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.world import World


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    """Two ranks."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Four ranks."""
    world = World(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def hosts() -> Iterator[World]:
    """Four ranks on two hosts played on this one: between them bytes travel over TCP."""
    world = World(4, lambda rank: {"PODRING_HOST_ID": f"host{rank // 2}"})
    yield world
    world.close()
