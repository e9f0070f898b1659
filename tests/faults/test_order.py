"""Ranks that do things in another order, or of another size, than their peers."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.chaos.test_bad_input import check
from tests.harness import attempt, report, run

LIMIT = 10.0


def test_order_of_operations_differs() -> None:
    """Rank 1 reduces, then broadcasts; the others the other way round."""

    def body() -> None:
        calls = [lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.all_reduce(torch.ones(8))]
        for call in reversed(calls) if dist.get_rank() == 1 else calls:
            call()

    ends = attempt(body, 3, op_timeout=LIMIT, timeout=LIMIT + 10)
    check(ends, "broadcast", LIMIT, 1)
    assert all("all_reduce" in end.error.message for end in ends if end.error)


def test_table_shows_what_each_rank_called() -> None:
    def body() -> None:
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(8 + rank, dtype=torch.float64 if rank == 2 else torch.float32))

    ends = attempt(body, 3, op_timeout=LIMIT, timeout=LIMIT + 10)
    for end in ends:
        assert end.error is not None, report(ends)
        for row in ("rank 0: all_reduce(SUM, float32, count=8)", "rank 1: all_reduce(SUM, float32, count=9)"):
            assert row in end.error.message, end.error.message
        assert "rank 2: all_reduce(SUM, float64, count=10)" in end.error.message, end.error.message


@pytest.mark.parametrize("list_form", [False, True], ids=["single", "list"])
def test_splits_that_do_not_match(list_form: bool) -> None:
    """Rank 0 sends rank 1 three rows; rank 1 expects two. Rank 0, whose own part may be done, hears of it at its next
    call at the latest."""

    def body() -> None:
        rank = dist.get_rank()
        give, take = ([1, 3], [1, 1]) if rank == 0 else ([1, 1], [2, 1])
        if list_form:
            dist.all_to_all([torch.zeros(n) for n in take], [torch.ones(n) for n in give])
        else:
            dist.all_to_all_single(torch.zeros(sum(take)), torch.ones(sum(give)), take, give)
        dist.barrier()

    check(attempt(body, 2, op_timeout=LIMIT, timeout=LIMIT + 10), "all_to_all", LIMIT, 0, 1)


@pytest.mark.parametrize("count", [3, 1 << 20], ids=["small", "large"])
@pytest.mark.parametrize("more", [True, False], ids=["long", "short"])
def test_receive_of_another_size(count: int, more: bool) -> None:
    """A message that is longer or shorter than the tensor that takes it: an error on both sides, no wrong data."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(count + (1 if more else -1)), 1)
            dist.barrier()
        else:
            dist.recv(torch.zeros(count), 0)

    ends = attempt(body, 2, op_timeout=LIMIT, timeout=LIMIT + 10)
    check(ends, "recv", LIMIT, 0, 1)
    sent = count + (1 if more else -1)
    text = f"expected {4 * count} bytes ({count} float32), rank 0 sent {4 * sent} bytes ({sent} float32)"
    assert all(f"recv from rank 0 on rank 1, seq 0: {text}" in end.error.message for end in ends if end.error)


@pytest.mark.parametrize("road", [{}, {"rank_env": lambda rank: {"PODRING_HOST_ID": f"h{rank}"}}], ids=["shm", "tcp"])
def test_receive_of_another_dtype(road: dict[str, harness.RankEnv]) -> None:
    """The receiver raises and ends at once; the sender hears of the cause, not of the end, though the receiver had sent
    it nothing before and had to call it first."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
            dist.barrier()
        else:
            dist.recv(torch.zeros(3, dtype=torch.int32), 0)

    ends = attempt(body, 2, op_timeout=LIMIT, timeout=LIMIT + 10, **road)  # type: ignore[arg-type]
    check(ends, "recv", LIMIT, 0, 1)
    text = "recv from rank 0 on rank 1, seq 0: expected 12 bytes (3 int32), rank 0 sent 12 bytes (3 float32)"
    assert all(text in end.error.message for end in ends if end.error)


@pytest.mark.parametrize("road", [{}, {"rank_env": lambda rank: {"PODRING_HOST_ID": f"h{rank}"}}], ids=["shm", "tcp"])
def test_interleaved_sends_and_receives(road: dict[str, harness.RankEnv]) -> None:
    """Two ranks, 60 messages each way with 3 tags, small and large, started in an order each draws for itself; within
    a tag they keep theirs."""

    def body() -> int:
        rank = dist.get_rank()
        numbers = random.Random(7)
        messages = [(number % 3, numbers.choice((1, 100, 5000, 200_000))) for number in range(60)]
        own = random.Random(rank)

        def tensor(source: int, number: int) -> torch.Tensor:
            return torch.full((messages[number][1],), float(100 * source + number))

        todo = [(kind, tag) for tag in range(3) for kind in ("send", "recv") for _ in range(20)]
        own.shuffle(todo)
        next_of = {
            (kind, tag): iter([n for n in range(60) if n % 3 == tag]) for kind in ("send", "recv") for tag in range(3)
        }
        works, received = [], []
        for kind, tag in todo:
            number = next(next_of[kind, tag])
            if kind == "send":
                works.append(dist.isend(tensor(rank, number), 1 - rank, tag=tag))
            else:
                received.append((number, target := torch.zeros(messages[number][1])))
                works.append(dist.irecv(target, 1 - rank, tag=tag))
        own.shuffle(works)
        for work in works:
            assert work is not None
            work.wait()
        return sum(torch.equal(got, tensor(1 - rank, number)) for number, got in received)

    assert run(body, 2, **road) == [60, 60]  # type: ignore[arg-type]


def test_receive_from_any_beside_a_tag_of_its_own() -> None:
    """Receives from any source take only their tag, and know their source."""

    def body() -> list[int]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank != 0:
            dist.send(torch.tensor([10 * rank]), 0, tag=5)
            dist.send(torch.tensor([20 * rank]), 0, tag=6)
            return []
        seen = []
        for tag, factor in ((6, 20), (5, 10)):
            for _ in range(ranks - 1):
                source = dist.recv(tensor := torch.zeros(1, dtype=torch.int64), tag=tag)
                assert tensor.item() == factor * source
                seen.append(source)
        assert sorted(seen[:3]) == sorted(seen[3:]) == [1, 2, 3]
        return seen

    assert len(run(body, 4)[0]) == 6


@pytest.mark.parametrize("road", [{}, {"rank_env": lambda rank: {"PODRING_HOST_ID": f"h{rank}"}}], ids=["shm", "tcp"])
@pytest.mark.parametrize("count", [8, 1 << 21], ids=["small", "large"])
def test_sender_leaves_with_an_isend_in_flight(count: int, road: dict[str, harness.RankEnv]) -> None:
    """Rank 1 sends without waiting, and exits without destroying the group. What was small has left with it; of what
    was large the receiver gets all or a named error, at once."""

    def body() -> str:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.isend(torch.full((count,), 7.0), 0)
            os._exit(0)
        time.sleep(0.5)
        try:
            dist.recv(tensor := torch.zeros(count), 1)
        except RuntimeError as error:
            return str(error)
        return "right" if bool((tensor == 7).all()) else "wrong"

    ends = attempt(body, 2, op_timeout=LIMIT, timeout=LIMIT + 10, **road)  # type: ignore[arg-type]
    value = ends[0].value
    assert ends[0].seconds < LIMIT / 2
    assert value == "right" if count == 8 else value == "right" or "lost rank 1" in value, report(ends)


def test_ranks_leave_when_their_part_is_done() -> None:
    """The last operation is no barrier: those whose part is done first destroy the group and exit at once."""

    def body() -> bool:
        ranks = dist.get_world_size()
        output = torch.zeros(ranks, dtype=torch.int64)
        dist.all_gather_into_tensor(output, torch.tensor([dist.get_rank()]))
        return torch.equal(output, torch.arange(ranks))

    assert run(body, 40) == [True] * 40
    assert run(body, 12, rank_env=lambda rank: {"PODRING_HOST_ID": f"h{rank % 3}"}) == [True] * 12


def test_ranks_leave_before_a_slow_one_has_begun() -> None:
    """What a rank has sent is good, also where the others come to need it only after they have heard that it left."""

    def body() -> list[str]:
        wrong = []
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for root in range(ranks):
            for slow in range(ranks):
                store = f"file://{os.environ['STORE_FILE']}{root}{slow}"
                dist.init_process_group(
                    harness.BACKEND, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
                )
                tensor = torch.full((100_651,), rank == slow)
                dist.barrier()
                if rank == slow:
                    time.sleep(0.1)
                try:
                    dist.reduce(tensor, root)
                    if rank == root and not tensor.all():
                        wrong.append(f"root {root}, slow {slow}: another result")
                except dist.DistBackendError as error:
                    wrong.append(f"root {root}, slow {slow}: {error}")
                dist.destroy_process_group()
        return wrong

    played = run(body, 4, init=False, timeout=60, rank_env=lambda rank: {"PODRING_HOST_ID": f"host{rank % 2}"})
    assert played == [[]] * 4
    assert run(body, 3, init=False, timeout=60) == [[]] * 3


def test_groups_made_in_another_order() -> None:
    """Rank 1 calls new_group for the same groups the other way round, so that torch gives them other names: an error on
    every rank in time, no sum over other members."""

    def body() -> None:
        groups: dict[int, Any] = {}
        orders = [[0, 1], [0, 1, 2]]
        for members in reversed(orders) if dist.get_rank() == 1 else orders:
            groups[len(members)] = dist.new_group(members, timeout=timedelta(seconds=2))
        dist.all_reduce(torch.ones(3), group=groups[3])

    check(attempt(body, 3, op_timeout=LIMIT, timeout=LIMIT + 10), "all_reduce", LIMIT)


def test_groups_made_by_their_members_alone() -> None:
    """use_local_synchronization: nobody outside a group takes part, and each rank makes its own only."""

    def body() -> list[float]:
        rank, sums = dist.get_rank(), []
        for members in ([0, 1], [2, 3]) if rank < 2 else ([2, 3],):
            if rank in members:
                group = harness.new_group(members, use_local_synchronization=True)
                dist.all_reduce(tensor := torch.tensor(float(10**rank)), group=group)
                sums.append(tensor.item())
        return sums

    assert run(body, 4) == [[11.0], [11.0], [1100.0], [1100.0]]


def test_wrong_rank_count() -> None:
    """Rank 1 believes in three ranks, the others in two."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        dist.init_process_group(
            harness.BACKEND, store=store, rank=rank, world_size=3 if rank == 1 else 2, timeout=timedelta(seconds=5)
        )
        dist.all_reduce(torch.ones(1))

    ends = attempt(body, 2, init=False, timeout=30)
    for end in ends:
        assert end.error is not None, report(ends)
        assert "3" in end.error.message and "2" in end.error.message, end.error.message
        assert end.seconds < 15


def test_one_launch_of_many() -> None:
    """start / end coalescing through torch's manager: different sizes, one work, right sums; and after one that
    was refused, the next batch is right."""

    def body() -> list[float]:
        device = torch.device("cpu")
        tensors = [torch.full((size,), 1.0 + index) for index, size in enumerate((3, 5000, 0, 1))]
        with dist._coalescing_manager(device=device, async_ops=True) as work:
            for tensor in tensors:
                dist.all_reduce(tensor)
        work.wait()
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        backend._start_coalescing()
        backend.allreduce([torch.ones(1).expand(4)])
        with pytest.raises(ValueError, match="expanded"):
            backend._end_coalescing()
        backend._start_coalescing()
        last = torch.ones(2)
        backend.allreduce([last])
        backend._end_coalescing().wait()
        return [tensor.sum().item() for tensor in (*tensors, last)]

    assert run(body, 2) == [[6.0, 20000.0, 0.0, 8.0, 4.0]] * 2
