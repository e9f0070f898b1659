"""Work and Future: callbacks that start and wait for collectives themselves, and what a Work tells."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import harness


def post(tensor: torch.Tensor) -> dist.Work:
    """An all_reduce under way."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work


def test_collective_inside_a_callback() -> None:
    """PowerSGD's hook does this: a driver that ran callbacks itself would wait for itself."""

    def body() -> float:
        def again(future: torch.futures.Future[Any]) -> torch.Tensor:
            (first,) = future.value()
            dist.all_reduce(first)
            return first

        return post(torch.ones(3)).get_future().then(again).wait().sum().item()

    assert harness.run(body, 2) == [3 * 4.0] * 2


def test_callbacks_three_deep_and_many_at_once() -> None:
    def body() -> list[float]:
        # A group each: callbacks run in any order, and within a group all ranks must post in the same one.
        groups = [harness.new_group() for _ in range(24)]

        def chain(group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
            def again(future: torch.futures.Future[Any]) -> torch.Tensor:
                value = future.value()
                tensor = value[0] if isinstance(value, list) else value
                dist.all_reduce(tensor, group=group)
                return tensor

            work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
            assert work is not None
            return work.get_future().then(again).then(again)

        return [future.wait()[0].item() for future in [chain(group) for group in groups]]

    assert harness.run(body, 2) == [[8.0] * 24] * 2


def test_future_carries_the_outputs() -> None:
    def body() -> bool:
        tensor = torch.full((4,), float(dist.get_rank()))
        value = post(tensor).get_future().wait()
        assert isinstance(value, list) and len(value) == 1
        return torch.equal(value[0], torch.ones(4)) and value[0].data_ptr() == tensor.data_ptr()

    assert harness.run(body, 2) == [True] * 2


def test_future_of_a_failed_work_raises() -> None:
    def body() -> str:
        dist.all_reduce(torch.ones(1))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), dist.group.WORLD)
        if dist.get_rank() == 1:
            time.sleep(4)
            return ""
        work = post(torch.ones(3))
        try:
            work.get_future().wait()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    message = harness.attempt(body, 2, op_timeout=20, timeout=30)[0].value
    assert message and "all_reduce" in message, message


def test_work_tells_its_state() -> None:
    def body() -> bool:
        if dist.get_rank() == 1:
            time.sleep(1)
        work = post(torch.ones(3))
        if dist.get_rank() == 0:
            assert not work.is_completed()
        work.wait(timedelta(seconds=20))
        return work.is_completed() and work.is_success() and work.exception() is None

    assert harness.run(body, 2) == [True] * 2


def test_wait_with_a_timeout_of_its_own() -> None:
    """Work.wait(t) gives up after t; the operation stays under way and can be waited for again."""

    def body() -> float:
        if dist.get_rank() == 1:
            time.sleep(2)
        tensor = torch.ones(3)
        work = post(tensor)
        if dist.get_rank() == 0:
            begin = time.monotonic()
            try:
                work.wait(timedelta(milliseconds=300))
            except RuntimeError:
                assert time.monotonic() - begin < 1.5
            else:
                raise AssertionError("no timeout")
        work.wait()
        return tensor[0].item()

    assert harness.run(body, 2) == [2.0] * 2


def test_recv_from_any_knows_its_source() -> None:
    def body() -> list[int]:
        rank = dist.get_rank()
        if rank:
            dist.send(torch.full((3,), float(rank)), 0)
            return []
        sources = []
        for _ in range(2):
            tensor = torch.zeros(3)
            source = dist.recv(tensor)
            assert tensor.tolist() == [float(source)] * 3
            sources.append(source)
        return sorted(sources)

    assert harness.run(body, 3)[0] == [1, 2]
