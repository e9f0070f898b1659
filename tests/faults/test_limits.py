"""Timeouts, their blame, and the ends of a group: abort, getError, memory statistics, monitored barriers."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import attempt, report, run


def backend(group: Any = None) -> Any:
    """The backend object of a group."""
    return (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))


def stay(seconds: float) -> None:
    """A rank that answers nothing for a while and goes."""
    time.sleep(seconds)
    os._exit(0)


def allow(seconds: float) -> None:
    """All ranks are there; from now on an operation has so long."""
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def fails(call: Any, kind: str = "DistBackendError") -> tuple[float, str]:
    """How long the call took to fail, and what it said."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        assert kind in [base.__name__ for base in type(error).__mro__], repr(error)
        return time.monotonic() - begin, str(error)
    raise AssertionError("no error")


def first(body: Any, ranks: int = 2, **options: Any) -> Any:
    """Rank 0's value, whatever the others did."""
    ends = attempt(body, ranks, timeout=30, **options)
    assert ends[0].returned, report(ends)
    return ends[0].value


def test_timeout_of_a_new_group() -> None:
    """The subgroup's own 1 s, not the default group's 30 s, and it blames the rank that did not come."""

    def body() -> Any:
        group = harness.new_group(timeout=timedelta(seconds=1))
        if dist.get_rank() == 1:
            stay(4)
        return fails(lambda: dist.all_reduce(torch.ones(1), group=group))

    seconds, message = first(body, op_timeout=30)
    assert 0.8 < seconds < 3.5, (seconds, message)
    assert re.search(r"waiting on rank 1\b", message) and "1000 ms" in message, message


def test_timeout_of_one_operation() -> None:
    """Options' timeout holds for that operation alone."""

    def body() -> Any:
        if dist.get_rank() == 1:
            stay(4)
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=700)
        work = dist.distributed_c10d._get_default_group().allreduce([torch.ones(3)], options)
        return fails(work.wait)

    seconds, message = first(body, op_timeout=30)
    assert 0.5 < seconds < 3, (seconds, message)
    assert "all_reduce" in message and re.search(r"waiting on rank 1\b", message), message


def test_timeout_set_later() -> None:
    """set_timeout, as TorchTitan calls it after its first steps."""

    def body() -> Any:
        allow(1)
        if dist.get_rank() == 1:
            stay(4)
        return fails(lambda: dist.all_reduce(torch.ones(1)))

    seconds, message = first(body, op_timeout=30)
    assert 0.8 < seconds < 3.5, (seconds, message)


def test_timeout_of_a_receive() -> None:
    def body() -> Any:
        allow(1)
        if dist.get_rank() == 1:
            stay(4)
        return fails(lambda: dist.recv(torch.ones(1), 1))

    seconds, message = first(body, op_timeout=30)
    assert 0.8 < seconds < 3.5 and "recv" in message and re.search(r"rank 1\b", message), (seconds, message)


def test_timeout_of_forming_a_group_names_the_missing() -> None:
    def body() -> Any:
        from tests.launch.test_init import init

        if os.environ["RANK"] in ("1", "3"):
            return None
        return fails(lambda: init(seconds=4))

    ends = attempt(body, 4, init=False, timeout=30)
    for rank in (0, 2):
        assert ends[rank].returned, report(ends)
        assert re.search(r"ranks 1, 3\b", ends[rank].value[1]), ends[rank].value


def test_abort_ends_what_is_under_way_everywhere() -> None:
    """Rank 0 aborts; rank 1's wait ends with its name, and so does every later call, on both."""

    def body() -> Any:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            pending = dist.irecv(torch.ones(4), 1)
            time.sleep(0.5)
            backend().abort()
            assert pending is not None
            under_way = fails(pending.wait)
        else:
            under_way = fails(lambda: dist.all_reduce(torch.ones(1)))
        return under_way, fails(lambda: dist.all_reduce(torch.ones(1)))

    for (seconds, message), (_, later) in run(body, 2, op_timeout=20):
        assert seconds < 5 and "abort" in message and "rank 0" in message, message
        assert "abort" in later, later


def test_get_error_tells_what_broke_the_group() -> None:
    def body() -> list[str]:
        before = str(backend().get_error())
        group = harness.new_group(timeout=timedelta(seconds=1))
        if dist.get_rank() == 1:
            stay(4)
        fails(lambda: dist.all_reduce(torch.ones(1), group=group))
        return [before, str(backend(group).get_error()), str(backend().get_error())]

    before, after, other = first(body)
    assert "SUCCESS" in before and "TIMEOUT" in after and "SUCCESS" in other, (before, after, other)


def test_memory_statistics() -> None:
    def body() -> dict[str, int]:
        dist.all_reduce(torch.ones(1000, 2)[:, 0])
        return dict(backend().memory_stats())

    for stats in run(body, 2):
        assert stats["shared_memory"] > 0 and stats["pooled"] >= 0, stats


def test_sequence_numbers_count_collectives() -> None:
    def body() -> list[int]:
        seen = [backend()._get_sequence_number_for_group()]
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        seen.append(backend()._get_sequence_number_for_group())
        return seen

    (before, after), other = run(body, 2)
    assert after == before + 2 and other == [before, after]


def test_monitored_barrier_twice_after_a_late_rank() -> None:
    """It names who is late and breaks nothing: the next one passes."""

    def body() -> str:
        message = ""
        if dist.get_rank() == 2:
            time.sleep(4)
        else:
            _, message = fails(lambda: dist.monitored_barrier(timeout=timedelta(seconds=2)), "RuntimeError")
        dist.barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=10))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 3
        return message

    messages = run(body, 3, op_timeout=20)
    assert re.search(r"\b2\b", messages[0]), messages


def test_join_after_destroy_of_a_broken_group() -> None:
    """A timeout breaks a group for good; destroying it and forming another works in the same process."""

    def body() -> float:
        from tests.launch.test_init import init

        init(seconds=20, suffix="a")
        allow(1)
        if os.environ["RANK"] == "0":
            fails(lambda: dist.all_reduce(torch.ones(1)))
        else:
            time.sleep(2)
        dist.destroy_process_group()
        init(seconds=20, suffix="b")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(body, 2, init=False) == [2.0, 2.0]


@pytest.mark.parametrize("threads", [4])
def test_several_threads_at_once(threads: int) -> None:
    """A group per thread, all in one process."""

    def body() -> list[float]:
        from concurrent.futures import ThreadPoolExecutor

        groups = [harness.new_group() for _ in range(threads)]

        def work(number: int) -> float:
            tensor = torch.full((3000,), float(number))
            for _ in range(20):
                dist.all_reduce(tensor, dist.ReduceOp.AVG, group=groups[number])
            return tensor.sum().item() / 3000

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, range(threads)))

    assert run(body, 3) == [[float(number) for number in range(threads)]] * 3
