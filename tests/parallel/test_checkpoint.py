"""torch.distributed.checkpoint: what one world saves, another of a different size loads, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness import new_group
from tests.parallel.model import Net, same, state, train
from tests.parallel.world import World


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def job(shape: tuple[int, ...]) -> tuple[Net, torch.optim.Optimizer]:
    """A sharded network and its optimizer, before any step."""
    net = Net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, adam(net)


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim, "step": torch.tensor(3), "note": {"text": "kept", "number": 7}}


def save(where: str, shape: tuple[int, ...], how: str) -> None:
    net, optimizer = job(shape)
    train(net, optimizer, dist.get_rank(), dist.get_world_size())
    if how == "save":
        dcp.save(states(net, optimizer), checkpoint_id=where)
        return
    # The collectives of async_save run on another thread while training goes on.
    kind = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}[how]
    group = None if how == "process" else new_group()
    response: Any = dcp.async_save(
        states(net, optimizer), checkpoint_id=where, async_checkpointer_type=kind, process_group=group
    )
    train(net, optimizer, dist.get_rank(), dist.get_world_size(), start=3, steps=2)
    response.result(timeout=40)


def load(where: str, shape: tuple[int, ...]) -> None:
    net, optimizer = job(shape)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    target = states(net, optimizer)
    target["step"], target["note"] = torch.tensor(0), {"text": "", "number": 0}
    dcp.load(target, checkpoint_id=where)
    set_state_dict(net, optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
    assert target["step"].item() == 3
    assert target["note"] == {"text": "kept", "number": 7}
    reference = Net()
    plain = adam(reference)
    train(reference, plain)
    same(state(net), state(reference), 2e-4)
    # What was loaded goes on as if nothing had been: Adam's moments came too.
    train(net, optimizer, dist.get_rank(), dist.get_world_size(), start=3, steps=2)
    train(reference, plain, start=3, steps=2)
    same(state(net), state(reference), 5e-4)


@pytest.mark.parametrize("how", ["save", "thread"])
def test_four_to_two_and_back(two: World, four: World, tmp_path: Path, how: str) -> None:
    """Saved by 4 ranks (FSDP2; HSDP), loaded by 2, and the other way: parameters at once and after 2 more steps of Adam
    against one process that never stopped; other things kept beside them."""
    shape = (4,) if how == "save" else (2, 2)
    four.run(save, str(tmp_path / "four"), shape, how)
    two.run(load, str(tmp_path / "four"), (2,))
    two.run(save, str(tmp_path / "two"), (2,), how)
    four.run(load, str(tmp_path / "two"), shape)


def test_async_save_by_a_process(two: World, tmp_path: Path) -> None:
    """async_save through a process beside each rank: as above, loaded by the same ranks."""
    two.run(save, str(tmp_path), (2,), "process", timeout=90)
    two.run(load, str(tmp_path), (2,))


def save_rows(where: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(77.0).reshape(7, 11)
    dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=where)


def load_columns(where: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(77.0).reshape(7, 11)
    into: dict[str, Any] = {"x": distribute_tensor(torch.zeros(7, 11), mesh, [Shard(1)])}
    dcp.load(into, checkpoint_id=where)
    assert torch.equal(into["x"].full_tensor(), whole)
    plain = {"x": torch.zeros(7, 11)}
    dcp.load(plain, checkpoint_id=where)
    assert torch.equal(plain["x"], whole)
    assert isinstance(into["x"], DTensor)


def test_rows_to_columns(two: World, four: World, tmp_path: Path) -> None:
    """A tensor saved by rows, unevenly, on 4 ranks, loaded by columns and whole on 2: all its numbers."""
    four.run(save_rows, str(tmp_path))
    two.run(load_columns, str(tmp_path))
