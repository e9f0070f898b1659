"""What podring says on stderr, as PODRING_LOG asks for it."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

from tests import harness
from tests.processes import run_program

TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z podring\[rank (\d)\] "
NOTE = re.compile(TIME + "WARN launcher: GROUP_RANK decides, not TPU_WORKER_ID, TPU_WORKER_HOSTNAMES: host 1 ", re.M)


def test_the_launchers_disagreement_is_told_as_podring_log_asks(tmp_path: Path) -> None:
    """One job whose ranks ask for different things; one's stderr is read by nobody, one has none."""
    env = {"OMP_NUM_THREADS": "1", "PODRING_LOG": ""}
    program = run_program([sys.executable, harness.PROGRAMS / "messages.py", tmp_path], timeout=60, env=env)
    assert program.code == 0, program.output
    rows = json.loads(program.output.splitlines()[-1])
    assert [value for value, _, _ in rows] == [6.0] * 6, program.output
    assert [stdout for _, _, stdout in rows] == [""] * 6, program.output
    usual, off, info, loud, _, _ = (said for _, said, _ in rows)
    # A note and nothing else; nothing; more; a complaint and a note.
    assert NOTE.findall(usual) == ["0"] and usual.count("\n") == 1, usual
    assert off == ""
    assert NOTE.findall(info) == ["2"], info
    assert re.findall(TIME + r"INFO python: what Python says of 2 graphs$", info, re.M) == ["2"], info
    assert loud.startswith('podring: PODRING_LOG="loud": expected off, error, '), loud
    assert NOTE.findall(loud) == ["3"] and loud.count("\n") == 2, loud


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
