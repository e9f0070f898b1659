"""Ranks as forked processes and programs as subprocesses: bounded, and none is ever left behind.

The parent has torch loaded, so a fork costs milliseconds where a fresh interpreter costs seconds. The parent itself
must never start a parallel region of torch's thread pool: its threads would not exist in the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing.connection
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
Connection = multiprocessing.connection.Connection


@dataclass
class Rank:
    """One forked rank: its output goes to `log`, and what it sends through its pipe to `messages`."""

    pid: int
    pidfd: int
    log: Path
    pipe: Connection
    exit_code: int | None = None
    messages: list[Any] = field(default_factory=list)
    ended: float = 0.0

    @property
    def failed(self) -> bool:
        """Ended by an exception or a signal."""
        return self.exit_code is not None and (self.exit_code in (1, 10) or self.exit_code < 0)

    def output(self, last: int = 6000) -> str:
        """The end of what the rank printed."""
        return self.log.read_text(errors="replace")[-last:] if self.log.exists() else ""


def fork(main: Callable[[Connection], None], log: Path, limit: float) -> Rank:
    """Starts main(pipe) in a child. Shortly before `limit` seconds it prints where each of its threads stands."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        _child(main, log, theirs, limit)
    theirs.close()
    return Rank(pid, os.pidfd_open(pid), log, ours)


def _child(main: Callable[[Connection], None], log: Path, pipe: Connection, limit: float) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        faulthandler.dump_traceback_later(max(limit - 1.0, 1.0), file=2)
        main(pipe)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_any(ranks: Sequence[Rank], until: float) -> None:
    """Returns when one of the ranks has ended or sent something, or at the time `until` (monotonic)."""
    poll = select.poll()
    for rank in ranks:
        if rank.exit_code is None:
            poll.register(rank.pidfd, select.POLLIN)
            # What is longer than the pipe's buffer would otherwise block its sender.
            if not rank.pipe.closed:
                poll.register(rank.pipe.fileno(), select.POLLIN)
    poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1)


def collect(rank: Rank) -> bool:
    """Takes what the rank has sent, and its exit code if it has ended; says whether it has."""
    if rank.exit_code is not None:
        return True
    _receive(rank)
    pid, status = os.waitpid(rank.pid, os.WNOHANG)
    if pid == 0:
        return False
    _receive(rank)
    rank.exit_code = os.waitstatus_to_exitcode(status)
    rank.ended = time.monotonic()
    os.close(rank.pidfd)
    rank.pipe.close()
    _kill_group(rank.pid)
    return True


def _receive(rank: Rank) -> None:
    while not rank.pipe.closed:
        try:
            if not rank.pipe.poll():
                return
            rank.messages.append(rank.pipe.recv())
        except (EOFError, OSError):
            rank.pipe.close()


def kill(rank: Rank) -> None:
    """Ends the rank and what it started, and collects it."""
    if rank.exit_code is None:
        _kill_group(rank.pid)
        signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        collect(rank)


def _kill_group(pid: int) -> None:
    """Kills the process group that we gave to the process `pid`, of which it is the leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@dataclass
class Program:
    """How a program ended: `code` is None if it had to be killed at its bound."""

    code: int | None
    output: str
    seconds: float


def run_program(
    command: Sequence[str | Path],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    started: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Program:
    """Runs a program, output and errors together, in a process group of its own that is killed at the end.

    `started` is called with the process once it runs, for tests that do something to it.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        start_new_session=True,
    )
    try:
        if started is not None:
            started(process)
        output, _ = process.communicate(timeout=max(0.1, timeout - (time.monotonic() - begin)))
        return Program(process.returncode, output, time.monotonic() - begin)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        output, _ = process.communicate(timeout=10)
        return Program(None, output, time.monotonic() - begin)
    finally:
        _kill_group(process.pid)
        process.wait(timeout=10)
