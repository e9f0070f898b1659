"""Runs a function on n ranks and tells how each of them ended.

def body(): ...          # uses torch.distributed; the default group exists already
values = run(body, 4)    # raises RanksFailed, with every rank's output, unless all returned
ends = attempt(body, 4)  # for tests of what goes wrong: one End per rank
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import select
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import processes

BACKEND = os.environ.get("PODRING_TEST_BACKEND", "tpu")
"""The backend that all tests run on."""
GRACE = 5.0
"""Seconds the other ranks get, in run(), after one has failed."""

RankEnv = Callable[[int], Mapping[str, str]]


@dataclass
class Error:
    """The exception that a rank's function raised."""

    kinds: tuple[str, ...]
    message: str
    trace: str

    def is_a(self, kind: str) -> bool:
        """Is it, or does it derive from, the class of that name?"""
        return kind in self.kinds


@dataclass
class End:
    """How one rank ended. `seconds` counts from the start of the rank's function to its end."""

    rank: int
    exit_code: int
    output: str
    value: Any = None
    error: Error | None = None
    seconds: float = 0.0
    returned: bool = False
    killed: bool = False


class RanksFailed(AssertionError):
    """Not all ranks returned."""


def run(
    body: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    op_timeout: float = 30.0,
    init: bool = True,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    rank_env: RankEnv | None = None,
) -> list[Any]:
    """What body(*args) returned on each rank, in rank order; RanksFailed unless it returned on all.

    `timeout` bounds the whole, `op_timeout` is the group's. `init` False leaves init_process_group to the body, with
    RANK, WORLD_SIZE and STORE_FILE in the environment. `env` holds for all ranks, rank_env(rank) for one.
    """
    ends = _run(body, ranks, args, timeout, op_timeout, init, backend or BACKEND, env, rank_env, impatient=True)
    if not all(end.returned and end.exit_code == 0 for end in ends):
        raise RanksFailed(report(ends))
    return [end.value for end in ends]


def attempt(
    body: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    op_timeout: float = 30.0,
    init: bool = True,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    rank_env: RankEnv | None = None,
    stays: int | None = None,
) -> list[End]:
    """As run(), but gives how each rank ended, whatever that was. Every rank gets the whole `timeout`.

    Only the one that `stays` is killed once the others have ended.
    """
    return _run(body, ranks, args, timeout, op_timeout, init, backend or BACKEND, env, rank_env, False, stays)


def report(ends: Sequence[End]) -> str:
    """Every rank's end and output, marked with its rank."""
    lines = []
    for end in ends:
        how = (
            "returned" if end.returned else "raised" if end.error else "killed at the bound" if end.killed else "ended"
        )
        lines.append(f"[rank {end.rank}] {how} after {end.seconds:.1f} s, exit code {end.exit_code}")
        text = (end.error.trace if end.error else "") + end.output
        lines += [f"[rank {end.rank}] {line}" for line in text.splitlines()]
    return "\n" + "\n".join(lines)


def _run(
    body: Callable[..., Any],
    ranks: int,
    args: Sequence[Any],
    timeout: float,
    op_timeout: float,
    init: bool,
    backend: str,
    env: Mapping[str, str] | None,
    rank_env: RankEnv | None,
    impatient: bool,
    stays: int | None = None,
) -> list[End]:
    directory = Path(tempfile.mkdtemp(prefix="podring-test-"))
    store = directory / "store"
    running: list[processes.Rank] = []
    start = _Start()

    def rank_main(rank: int) -> Callable[[processes.Connection], None]:
        def main(pipe: processes.Connection) -> None:
            torch.set_num_threads(1)
            os.environ.update(env or {})
            os.environ.update(rank_env(rank) if rank_env else {})
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), STORE_FILE=str(store))
            start.wait()
            started = time.monotonic()
            try:
                if init:
                    dist.init_process_group(
                        backend,
                        init_method=f"file://{store}",
                        rank=rank,
                        world_size=ranks,
                        timeout=timedelta(seconds=op_timeout),
                    )
                value = body(*args)
                seconds = time.monotonic() - started
                if init and dist.is_initialized():
                    dist.destroy_process_group()
                pipe.send(pickle.dumps(("returned", value, seconds)))
            except Exception as error:
                kinds = tuple(kind.__name__ for kind in type(error).__mro__)
                caught = Error(kinds, str(error), traceback.format_exc())
                pipe.send(pickle.dumps(("raised", caught, time.monotonic() - started)))
                raise SystemExit(1) from None

        return main

    begin = time.monotonic()
    deadline = begin + timeout
    killed: set[int] = set()
    try:
        running = [processes.fork(rank_main(rank), directory / f"rank{rank}.log", timeout) for rank in range(ranks)]
        start.give(ranks, deadline)
        while True:
            ended = [processes.collect(rank) for rank in running]
            if all(ended):
                break
            if stays is not None and all(end or number == stays for number, end in enumerate(ended)):
                deadline = time.monotonic()
            if impatient and any(rank.failed for rank in running):
                deadline = min(deadline, max(rank.ended for rank in running if rank.failed) + GRACE)
            if time.monotonic() >= deadline:
                for number, rank in enumerate(running):
                    if rank.exit_code is None:
                        killed.add(number)
                        processes.kill(rank)
                break
            processes.wait_any(running, deadline)
        return [_end(number, rank, begin, number in killed) for number, rank in enumerate(running)]
    finally:
        start.close()
        for rank in running:
            processes.kill(rank)
        shutil.rmtree(directory, ignore_errors=True)


class _Start:
    """Lets the ranks begin together, once each of them runs: on a busy machine that may take seconds."""

    def __init__(self) -> None:
        self._ready, self._say_ready = os.pipe()
        self._go, self._say_go = os.pipe()

    def wait(self) -> None:
        """In a rank: says that it runs, and returns when all do, or when there is nobody who would say so."""
        os.close(self._ready)
        os.close(self._say_go)
        os.write(self._say_ready, b".")
        os.read(self._go, 1)
        os.close(self._say_ready)
        os.close(self._go)

    def give(self, ranks: int, deadline: float) -> None:
        """In the parent, once all are forked."""
        os.close(self._say_ready)
        self._say_ready = -1
        came = 0
        while came < ranks and select.select([self._ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            said = len(os.read(self._ready, 4096))
            if said == 0:
                break
            came += said
        self.close()

    def close(self) -> None:
        """Closes what is open."""
        for name, fd in list(vars(self).items()):
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def _end(number: int, rank: processes.Rank, begin: float, killed: bool) -> End:
    assert rank.exit_code is not None
    end = End(number, rank.exit_code, rank.output(), killed=killed, seconds=rank.ended - begin)
    for message in rank.messages:
        how, what, end.seconds = pickle.loads(message)
        if how == "returned":
            end.value, end.returned = what, True
        else:
            end.error = what
    return end


PROGRAMS = Path(__file__).parent / "programs"
"""Small jobs for what needs fresh interpreters."""


def new_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
    """dist.new_group for a rank that is a member."""
    group = dist.new_group(*args, **kwargs)
    assert isinstance(group, dist.ProcessGroup)
    return group


def free_port() -> int:
    """A TCP port that was free a moment ago, for IPv4 and IPv6.

    Not one that the system gives to whoever connects somewhere: it could be taken before the test's own server has it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = first - 10_000
    # Where the system has nearly all for those, any that it gives.
    ports = [10_000 + secrets.randbelow(below) for _ in range(100)] if below > 1000 else []
    for port in ports:
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    """The port that a socket got which asked for this one."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("::", port))
        got: int = probe.getsockname()[1]
        return got


def run_job(
    program: str, ranks: int, *args: str, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> list[processes.Program]:
    """Runs tests/programs/`program BACKEND args…` once per rank, in fresh interpreters with RANK and WORLD_SIZE set."""
    command: list[str | Path] = [sys.executable, PROGRAMS / program, BACKEND, *args]

    def one(rank: int) -> processes.Program:
        ids = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        return processes.run_program(command, timeout, env={**ids, **(env or {})})

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))
