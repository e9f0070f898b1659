"""Ranks that die, stall or fork: the others hear of it by name, and soon."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.chaos.test_bad_input import check
from tests.harness import attempt, report, run

VICTIM = 2
PROMPT = 5.0
"""Seconds in which a death on this host must have reached everybody; the operations' timeout is far longer."""


def die() -> None:
    """As the kernel's out-of-memory killer would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


def large() -> None:
    dist.all_reduce(torch.ones(1 << 22))


def small() -> None:
    dist.all_reduce(torch.ones(1))


def gather() -> None:
    dist.all_gather_into_tensor(torch.empty(3 << 18), torch.ones(1 << 18))


@pytest.mark.parametrize(("call", "op"), [(small, "all_reduce"), (large, "all_reduce"), (gather, "all_gather")])
def test_dead_peer_is_named(call: Callable[[], None], op: str) -> None:
    """Rank 2 is killed while the others wait for it."""

    def body() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == VICTIM:
            time.sleep(0.5)
            die()
        call()

    ends = attempt(body, 3, op_timeout=60, timeout=30)
    check(ends[:VICTIM], op, PROMPT, VICTIM)


def test_death_before_the_call() -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == VICTIM:
            die()
        time.sleep(1)
        small()

    check(attempt(body, 3, op_timeout=60, timeout=30)[:VICTIM], "all_reduce", PROMPT, VICTIM)


def test_death_of_a_sender() -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == VICTIM:
            time.sleep(0.5)
            die()
        if dist.get_rank() == 0:
            dist.recv(torch.ones(4), VICTIM)

    check(attempt(body, 3, op_timeout=60, timeout=30)[:1], "recv", PROMPT, VICTIM)


def test_death_between_played_hosts() -> None:
    """The victim sits alone on another host: only its connections tell."""

    def body() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == VICTIM:
            time.sleep(0.5)
            die()
        large()

    hosts = {0: "a", 1: "a", VICTIM: "b"}
    ends = attempt(body, 3, op_timeout=60, timeout=30, rank_env=lambda rank: {"PODRING_HOST_ID": hosts[rank]})
    check(ends[:VICTIM], "all_reduce", PROMPT, VICTIM)


@pytest.mark.parametrize("call", [small, large])
def test_silent_peer_times_out(call: Callable[[], None]) -> None:
    """Rank 2 lives but never calls: the timeout is the group's, and says for whom it waited."""

    def body() -> None:
        dist.all_reduce(torch.ones(2))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
        if dist.get_rank() == VICTIM:
            time.sleep(8)
            os._exit(0)
        call()

    ends = attempt(body, 3, op_timeout=20, timeout=30)
    check(ends[:VICTIM], "all_reduce", 2 + 3.0, VICTIM)
    assert all(end.seconds > 1.5 for end in ends), report(ends)


def start_worker(number: int) -> None:
    """In a DataLoader's worker: out of the rank's process group, so that the harness does not end it with the rank."""
    os.setsid()


def test_death_of_a_rank_with_workers() -> None:
    """Workers forked after init outlive their killed rank by seconds; nothing they inherited may hide its death."""

    def body() -> None:
        dist.all_reduce(torch.ones(2))
        data = TensorDataset(torch.arange(64))
        loader = DataLoader(
            data,
            batch_size=4,
            num_workers=2,
            worker_init_fn=start_worker,
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        seen = iter(loader)
        next(seen)
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == VICTIM:
            time.sleep(0.5)
            die()
        small()

    check(attempt(body, 3, op_timeout=60, timeout=30)[:VICTIM], "all_reduce", PROMPT, VICTIM)


def test_group_in_a_forked_child_raises() -> None:
    """Only using the group in a child is wrong; the parent's goes on, also after the child's end."""

    def body() -> tuple[int, float]:
        small()
        child = os.fork()
        if child == 0:
            try:
                small()
            except Exception as error:
                os._exit(0 if re.search(r"fork", str(error)) else 4)
            os._exit(5)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return code, tensor[0].item()

    assert run(body, 2, op_timeout=10, timeout=30) == [(0, 2.0)] * 2


def test_monitored_barrier_names_the_missing() -> None:
    def body() -> None:
        from datetime import timedelta

        if dist.get_rank() in (1, 3):
            time.sleep(5)
            os._exit(0)
        dist.monitored_barrier(timeout=timedelta(seconds=1.5), wait_all_ranks=True)

    ends = attempt(body, 4, timeout=20)
    error = ends[0].error
    assert error is not None and re.search(r"\b1\b.*\b3\b", error.message), report(ends)
