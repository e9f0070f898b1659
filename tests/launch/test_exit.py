"""Leaving: without destroy_process_group, with operations under way, by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import run_job


@pytest.mark.parametrize("how", ["idle", "small", "large", "irecv", "async", "code"])
def test_exit_without_destroy(how: str, tmp_path: Path) -> None:
    """Neither a hang nor another exit code, whatever is under way."""
    for program in run_job("leave.py", 2, f"file://{tmp_path}/store", how, timeout=45):
        assert "leaves" in program.output, program.output
        assert program.code == (3 if how == "code" else 0), program.output


def all_reduce() -> None:
    dist.all_reduce(torch.ones(3))


def wait_for_work() -> None:
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert work is not None
    work.wait()


def receive() -> None:
    dist.recv(torch.ones(3), 1)


def barrier() -> None:
    dist.barrier()


@pytest.mark.parametrize("wait", [all_reduce, wait_for_work, receive, barrier])
def test_interrupt_ends_a_wait(wait: Callable[[], None]) -> None:
    """SIGINT while rank 1 does not answer: KeyboardInterrupt within about a second."""

    def body() -> float | None:
        if dist.get_rank() == 1:
            # Stays, so that the interrupt and not a death ends the wait; the harness's bound ends the rank at last.
            time.sleep(6)
            os._exit(0)
        signalled = []

        def interrupt() -> None:
            time.sleep(1)
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            wait()
        except KeyboardInterrupt:
            took = time.monotonic() - signalled[0]
            print(f"KeyboardInterrupt after {took:.2f} s", flush=True)
            os._exit(0 if took < 1.5 else 9)
        os._exit(8)

    ends = harness.attempt(body, 2, timeout=20)
    assert ends[0].exit_code == 0, harness.report(ends)
    assert "KeyboardInterrupt after" in ends[0].output
