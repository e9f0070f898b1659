"""Operations that one side has given up: what is in its memory afterwards is nobody's result."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import attempt, report, run

LARGE = 1 << 20
ROADS: dict[str, dict[str, Any]] = {
    "shm": {},
    "staged": {"env": {"PODRING_CMA": "0"}},
    "tcp": {"rank_env": lambda rank: {"PODRING_HOST_ID": f"h{rank}"}},
}


@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)
def test_a_send_that_timed_out_is_not_received_later(road: dict[str, Any]) -> None:
    """Its tensor is the caller's again: the receiver, who had heard of the message, must not take it."""

    def body() -> str:
        dist.all_reduce(torch.ones(1))
        try:
            if dist.get_rank() == 0:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
                sent = torch.ones(LARGE)
                try:
                    dist.send(sent, 1)
                finally:
                    sent.fill_(7)
                    time.sleep(3)
            else:
                time.sleep(2)
                got = torch.zeros(LARGE)
                dist.recv(got, 0)
                return f"received {got.unique().tolist()}"
        except dist.DistBackendError as error:
            return str(error)
        return "sent"

    ends = attempt(body, 2, op_timeout=20, timeout=40, **road)
    for end in ends:
        assert end.value and "send" in end.value and "1000 ms" in end.value, report(ends)


def test_what_a_stopped_rank_reads_later_is_no_result() -> None:
    """The root's broadcast times out while its receiver stands still with the offer before it."""

    def body() -> str:
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        try:
            if dist.get_rank() == 0:
                time.sleep(1)
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
                sent = torch.ones(LARGE)
                try:
                    dist.broadcast(sent, 0)
                finally:
                    sent.fill_(7)
                    os.kill(int(pids[1]), signal.SIGCONT)
                    time.sleep(3)
                return "sent"
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
            got = torch.zeros(LARGE)
            dist.broadcast(got, 0)
            return f"received {got.unique().tolist()}"
        except dist.DistBackendError as error:
            return str(error)

    ends = attempt(body, 2, op_timeout=20, timeout=40)
    for end in ends:
        assert end.value and "broadcast" in end.value and "1000 ms" in end.value, report(ends)


def test_a_held_interpreter_lock_is_no_silence() -> None:
    """The main thread waits, another one holds the lock for three times the silence: other hosts still hear of it."""

    def body() -> bool:
        dist.all_reduce(torch.ones(1))
        tensor = torch.zeros(1)
        if dist.get_rank() == 0:
            threading.Timer(0.3, lambda: ctypes.PyDLL(None).usleep(3_000_000)).start()
            dist.recv(tensor, 1)
        else:
            time.sleep(4)
            dist.send(tensor, 0)
        return True

    hosts = ROADS["tcp"]["rank_env"]
    assert run(body, 2, env={"PODRING_SILENCE_MS": "1000"}, rank_env=hosts) == [True, True]
