"""The same scenarios on two hosts of two ranks, where collectives go through shared memory and TCP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import BACKEND
from tests.parallel import (
    test_checkpoint,
    test_ddp,
    test_dtensor,
    test_fsdp,
    test_functional,
    test_groups,
    test_objects,
    test_pipeline,
)
from tests.parallel.world import World

pytestmark = pytest.mark.skipif(BACKEND != "tpu", reason="hosts are played by podring")

SCENARIOS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "DDP": (test_ddp.wrapped, ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},)),
    "ZeRO": (test_ddp.zero, (True,)),
    "FSDP2": (test_fsdp.fsdp2, ((4,), {}, 0.3, 1e-5)),
    "HSDP": (test_fsdp.fsdp2, ((2, 2), {}, 0.3, 1e-5)),
    "tensor parallel": (test_dtensor.tensor_parallel, ()),
    "FSDP2 × tensor parallel": (test_dtensor.two_dimensional, ()),
    "interleaved 1F1B": (test_pipeline.scheduled, ("interleaved 1F1B",)),
    "objects": (test_objects.objects, (False,)),
    "objects of a subset": (test_objects.objects, (True,)),
    "functional collectives": (test_functional.eager, ()),
    "subsets": (test_groups.subsets, ()),
    "splits": (test_groups.splits, ()),
    "meshes": (test_groups.meshes, ((2, 2), {"a": "gloo"})),
    "the same members thrice": (test_groups.twins, ()),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(hosts: World, name: str) -> None:
    """Compares what the scenario compares on one host."""
    body, args = SCENARIOS[name]
    hosts.run(body, *args)


def test_checkpoint_moves_between_worlds(hosts: World, two: World, tmp_path: Path) -> None:
    """Saved on two hosts as HSDP, loaded on one by two ranks: parameters, and 2 more steps of Adam."""
    hosts.run(test_checkpoint.save, str(tmp_path), (2, 2), "save")
    two.run(test_checkpoint.load, str(tmp_path), (2,))
