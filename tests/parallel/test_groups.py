"""Groups of every kind: each collective's numbers are compared with what its members alone would compute."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import BACKEND, new_group, run
from tests.parallel.world import World

NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def total(group: Any = None) -> float:
    """The sum of the members' ranks, each plus 1, all-reduced over the group."""
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


def members(group: Any) -> list[int]:
    """Global ranks, in the group's order, as an allgather over the group gives them."""
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=group)
    return [int(tensor) for tensor in gathered]


def subsets() -> None:
    rank = dist.get_rank()
    for ranks in ([0, 1, 2, 3], [0], [3], [1, 2], [0, 3], [0, 2, 3]):
        group: Any = dist.new_group(ranks)
        if rank not in ranks:
            assert group is NOT_A_MEMBER
            continue
        assert dist.get_process_group_ranks(group) == ranks
        assert members(group) == ranks
        assert total(group) == sum(r + 1 for r in ranks)
        # Roots are global ranks.
        root = torch.full((2,), float(rank))
        dist.broadcast(root, src=ranks[-1], group=group)
        assert root.tolist() == [float(ranks[-1])] * 2


def test_subsets(four: World) -> None:
    """new_group on subsets, one member to all: ranks gathered, sums and a broadcast against the list given."""
    four.run(subsets)


def unordered() -> None:
    group = new_group([2, 0, 3, 1], use_local_synchronization=False)
    assert members(group) == [0, 1, 2, 3], "new_group sorts"
    assert total(group) == 10.0
    # Each half knows of its own group only.
    mine = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
    local = new_group(mine, use_local_synchronization=True)
    assert members(local) == mine
    assert total(local) == sum(rank + 1 for rank in mine)


def test_unordered_and_local(four: World) -> None:
    """Ranks given in another order, and groups that only their members make: ranks gathered and sums."""
    four.run(unordered)


def twins() -> None:
    groups: list[Any] = [new_group([0, 1, 2, 3]), new_group([0, 1, 2, 3]), dist.group.WORLD]
    assert groups[0].group_name != groups[1].group_name
    rank = dist.get_rank()
    for turn in range(20):
        tensors = [torch.full((1000,), float(rank + 10 * k + turn)) for k in range(3)]
        # Each rank starts them in an order of its own: only the order within a group matters.
        order = [(k + rank + turn) % 3 for k in range(3)]
        works = {k: dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in order}
        for k in reversed(order):
            works[k].wait()
        for k in range(3):
            assert tensors[k].tolist() == [6.0 + 4 * (10 * k + turn)] * 1000


def test_same_members_in_three_groups(four: World) -> None:
    """Three groups of the same members, collectives in flight in all, started in different orders: sums."""
    four.run(twins)


def timeouts() -> None:
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match=r"(?i)tim(ed|e) ?out"):
            dist.all_reduce(torch.ones(1), group=group)
    # The default group does not know of it.
    assert total() == 10.0


def test_group_timeout_is_the_groups_own(four: World) -> None:
    """A group's own timeout of 1 s ends its lonely collective, while the default group's sum still comes."""
    four.run(timeouts)


def resources() -> tuple[list[str], int]:
    """Threads of this process by name, and how many descriptors it has.

    The process has one pool for callbacks, whatever the number of groups; its threads come and go.
    """
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return sorted(name for name in names if not name.startswith("podring-callb")), len(os.listdir("/proc/self/fd"))


def a_thousand() -> dict[str, tuple[list[str], int]]:
    # Links and helper threads are made when first needed.
    total(new_group([0, 1]))
    dist.destroy_process_group(new_group([0, 1]))
    time.sleep(0.2)
    before = resources()
    alive = [new_group([0, 1]) for _ in range(1000)]
    for number, group in enumerate(alive):
        tensor = torch.full((1,), float(number))
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2.0 * number
    during = resources()
    for group in alive:
        dist.destroy_process_group(group)
    assert total() == 3.0
    assert len(os.listdir("/proc/self/task")) <= len(before[0]) + 2
    return {"before": before, "alive": during, "after": resources()}


def test_a_thousand_groups(two: World) -> None:
    """1,000 groups made, all used, and destroyed: sums, and threads and descriptors of the process against those from
    before."""
    for rank, seen in enumerate(two.run(a_thousand, timeout=90)):
        assert seen["alive"] == seen["after"] == seen["before"], f"rank {rank}: {seen}"


def splits() -> None:
    rank = dist.get_rank()
    half: Any = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    mine = [0, 1] if rank < 2 else [2, 3]
    assert members(half) == mine
    assert total(half) == sum(r + 1 for r in mine)
    # A split of a split: ranks within the parent.
    single = dist.split_group(half, split_ranks=[[1]])
    if rank in (1, 3):
        assert members(single) == [rank]
        assert total(single) == rank + 1
    else:
        assert single is NOT_A_MEMBER or single is None
    part = dist.split_group(split_ranks=[[0, 3]], timeout=timedelta(seconds=7), group_desc="ends")
    if rank in (0, 3):
        assert members(part) == [0, 3]
        assert total(part) == 5.0
    else:
        assert part is NOT_A_MEMBER or part is None


def test_split_group(four: World) -> None:
    """split_group into halves, of a half, and into one part: ranks gathered and sums."""
    four.run(splits)


def meshes(shape: tuple[int, ...], override: dict[Any, Any] | None) -> None:
    names = ("a", "b", "c")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=dict(override) if override else None)
    rank, grid = dist.get_rank(), torch.arange(torch.Size(shape).numel()).reshape(shape)
    where = (grid == rank).nonzero()[0].tolist()
    assert list(mesh.get_coordinate() or ()) == where
    for axis, name in enumerate(names):
        index: list[Any] = list(where)
        index[axis] = slice(None)
        want = grid[tuple(index)].tolist()
        group = mesh.get_group(name)
        assert dist.get_backend(group) == (override or {}).get(name, BACKEND)
        assert members(group) == want
        assert total(group) == sum(r + 1 for r in want)
    if len(shape) > 1:
        flat = mesh[names[:2]]._flatten()
        assert total(flat.get_group()) == sum(
            r + 1 for r in grid[(slice(None), slice(None), *where[2:])].flatten().tolist()
        )


@pytest.mark.parametrize(
    ("shape", "override"),
    [
        ((4,), None),
        ((2, 2), None),
        ((2, 2), {"a": "gloo"}),
        ((2, 1, 2), None),
        ((2, 1, 2), {"c": "gloo"}),
    ],
    ids=str,
)
def test_device_mesh(four: World, shape: tuple[int, ...], override: dict[str, str] | None) -> None:
    """1-D to 3-D meshes, of ours alone and with gloo on one dimension: ranks along each axis and their sums."""
    four.run(meshes, shape, override)


def cube() -> None:
    meshes((2, 2, 2), None)
    meshes((2, 2, 2), {"b": "gloo"})


def test_device_mesh_of_eight() -> None:
    """2×2×2, of ours alone and with gloo on one dimension: ranks along each axis and their sums."""
    run(cube, 8)


def mixed(backend: str) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{os.environ['STORE_FILE']}",
        rank=int(os.environ["RANK"]),
        world_size=4,
        timeout=timedelta(seconds=20),
    )
    assert dist.get_backend_config() == backend
    assert total() == 10.0
    meshes((2, 2), {"a": "gloo", "b": BACKEND})
    dist.destroy_process_group()


def test_gloo_as_the_default() -> None:
    """The default group is cpu:gloo; a mesh has ours on one dimension and gloo on the other."""
    run(mixed, 4, "cpu:gloo", init=False)


def tpu_and_gloo() -> None:
    # What torch_tpu does when it finds a chip.
    torch.utils.rename_privateuse1_backend("tpu")
    dist.init_process_group(
        f"cpu:gloo,tpu:{BACKEND}",
        init_method=f"file://{os.environ['STORE_FILE']}",
        rank=int(os.environ["RANK"]),
        world_size=4,
        timeout=timedelta(seconds=20),
    )
    world = dist.distributed_c10d._get_default_group()
    assert world._get_backend(torch.device("cpu")).name() == "gloo"
    assert {device.type for device in world._device_types} == {"cpu", "tpu"}
    ours = world._get_backend(torch.device("tpu"))
    assert ours.name() == BACKEND
    assert total() == 10.0
    mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    for name, want in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        assert members(mesh.get_group(name)) == want
        # The CPU's tensors go over gloo; ours exists beside it and carries a collective too.
        tensor = torch.full((2,), float(rank))
        backend: Any = mesh.get_group(name)._get_backend(torch.device("tpu"))
        backend.allreduce([tensor]).wait()
        assert tensor.tolist() == [float(sum(want))] * 2
    dist.destroy_process_group()


@pytest.mark.skipif(BACKEND != "tpu", reason="only podring serves the device tpu")
def test_tpu_beside_gloo() -> None:
    """cpu:gloo,tpu:tpu with a 2-D mesh of device "tpu": both backends of each dimension's group give the right sum."""
    run(tpu_and_gloo, 4, init=False)


def again() -> list[float]:
    sums = []
    for turn in range(3):
        dist.init_process_group(
            BACKEND,
            init_method=f"file://{os.environ['STORE_FILE']}{turn}",
            rank=int(os.environ["RANK"]),
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        group = new_group([0, 1])
        sums.append(total(group) + total())
        dist.destroy_process_group()
    return sums


def test_init_after_destroy() -> None:
    """Three worlds in one process, each with a subgroup, after each other: sums."""
    for values in run(again, 2, init=False):
        assert values == [6.0] * 3


def threads() -> None:
    rank = dist.get_rank()
    groups = [new_group([0, 1]) for _ in range(4)]
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(50):
                tensor = torch.full((17 + 301 * number,), float(rank + turn + number))
                dist.all_reduce(tensor, group=groups[number])
                want = 1.0 + 2 * (turn + number)
                if tensor.tolist() != [want] * tensor.numel():
                    wrong.append(f"thread {number}, turn {turn}: expected {want}, got {tensor}")
                got = torch.zeros(5)
                ask = dist.irecv(got, src=1 - rank, tag=number)
                dist.send(torch.full((5,), float(100 * number + turn)), dst=1 - rank, tag=number)
                assert ask is not None
                ask.wait()
                if got.tolist() != [100.0 * number + turn] * 5:
                    wrong.append(f"thread {number}, turn {turn}: received {got}")
        except Exception as error:
            wrong.append(f"thread {number}: {error!r}")

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
        assert not worker.is_alive()
    assert wrong == []


def test_threads(two: World) -> None:
    """Four threads at once, each with a group of its own for collectives and a tag of its own for messages: sums and
    the messages' contents."""
    two.run(threads)


def sums_from_many_threads() -> Tensor:
    # All in one group: which thread's call meets which is open, so every tensor is the same.
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(50):
            tensor = torch.full((33,), float(dist.get_rank() + 1))
            dist.all_reduce(tensor)
            results.append(tensor)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
    return torch.stack(results)


def test_threads_in_one_group(two: World) -> None:
    """Four threads all-reduce in the same group at once: 200 sums."""
    for got in two.run(sums_from_many_threads):
        assert got.shape == (200, 33)
        assert bool((got == 3.0).all())
