"""Leaves what only `make vchip` runs out of `make test`."""

from __future__ import annotations

import os

import pytest

from tests.vchip import jobs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jobs.ALL:
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def nothing_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that other tests import set such variables for the whole process: JAX names its libtpu."""
    for name in list(os.environ):
        if name.startswith("TPU_") or name == "TORCH_DEVICE_BACKEND_AUTOLOAD":
            monkeypatch.delenv(name)
