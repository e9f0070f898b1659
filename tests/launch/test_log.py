"""What podring says on stderr, as PODRING_LOG asks for it."""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests import harness

TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z podring\[rank (\d)\] "
NOTE = re.compile(TIME + "WARN launcher: GROUP_RANK decides, not TPU_WORKER_ID, TPU_WORKER_HOSTNAMES: host 1 ", re.M)
# The launcher counts this host as another one than the slice does.
SLICE = {"GROUP_RANK": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}
ASKED = ["", "off", "info", "loud", "debug", "debug"]
BROKEN, CLOSED = 4, 5


def test_the_launchers_disagreement_is_told_as_podring_log_asks(tmp_path: Path) -> None:
    """One job; every rank asks for something else, one has a stderr that nobody reads, one has none."""

    def body() -> float:
        rank = int(os.environ["RANK"])
        os.dup2(os.open(tmp_path / f"stdout{rank}", os.O_WRONLY | os.O_CREAT), 1)
        os.environ["LOCAL_RANK"] = "0"
        if rank == CLOSED:
            os.close(2)
        elif rank == BROKEN:
            reader, writer = os.pipe()
            os.dup2(writer, 2)
            os.close(reader)
        dist.init_process_group(
            harness.BACKEND,
            init_method=f"file://{os.environ['STORE_FILE']}",
            rank=rank,
            world_size=len(ASKED),
            timeout=timedelta(seconds=30),
        )
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        from podring import _graphs

        _graphs._log_as_asked()
        _graphs.log.info("what Python says of %d graphs", 2)
        dist.destroy_process_group()
        return tensor[0].item()

    ends = harness.attempt(
        body, len(ASKED), init=False, env=SLICE, rank_env=lambda rank: {"PODRING_LOG": ASKED[rank]} if rank else {}
    )
    assert [end.value for end in ends] == [len(ASKED)] * len(ASKED), harness.report(ends)
    for rank, end in enumerate(ends):
        assert (tmp_path / f"stdout{rank}").read_text() == "", rank
        if rank not in (BROKEN, CLOSED):
            told = [] if ASKED[rank] == "off" else [str(rank)]
            assert NOTE.findall(end.output) == told, harness.report(ends)
    # A note and nothing else, nothing, more, a complaint and a note.
    assert ends[0].output.count("\n") == 1, harness.report(ends)
    assert ends[1].output == "", harness.report(ends)
    said = re.compile(TIME + r"INFO python: what Python says of 2 graphs$", re.M)
    assert said.findall(ends[2].output) == ["2"], harness.report(ends)
    complaint = ends[3].output.splitlines()[0]
    assert complaint.startswith('podring: PODRING_LOG="loud": expected off, error, '), complaint
    assert ends[3].output.count("\n") == 2, harness.report(ends)


def test_a_forked_child_may_log_whatever_its_parent_was_logging() -> None:
    """The parent's other threads log without end; no child finds a lock that one of them held."""

    def body() -> int:
        from podring import _core

        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        over = threading.Event()

        def log() -> None:
            while not over.is_set():
                _core.log(30, "x" * 200)

        threads = [threading.Thread(target=log) for _ in range(3)]
        for thread in threads:
            thread.start()
        right = 0
        for _ in range(50):
            child = os.fork()
            if child == 0:
                _core.log(40, "the child")
                os._exit(7)
            end = time.monotonic() + 10
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
                time.sleep(0.001)
            if ended == (0, 0):
                os.kill(child, 9)
                os.waitpid(child, 0)
                break
            right += os.waitstatus_to_exitcode(ended[1]) == 7
        over.set()
        for thread in threads:
            thread.join()
        return right

    assert harness.run(body, 1, init=False, timeout=40) == [50]
