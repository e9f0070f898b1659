"""Schedules the suite's tests: several at once, each on its own forked ranks and within its own bound."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import processes

GRACE = 3.0
"""Seconds the other ranks get to end by themselves after one has failed: their words may be the better ones."""


@dataclass
class Result:
    """How one test ended on all its ranks. `detail` is empty for a pass."""

    outcome: str
    seconds: float
    detail: str = ""


@dataclass
class Running:
    """One test under way."""

    name: str
    directory: Path
    started: float
    deadline: float
    ranks: list[processes.Rank]
    timed_out: bool = False

    def describe(self) -> str:
        """What each rank left: exit code, traceback, the end of its output."""
        parts = []
        for number, rank in enumerate(self.ranks):
            end = "killed: over the time limit, or another rank had failed" if rank.exit_code == -9 else ""
            # The suite logs once more what it sends.
            output = "\n".join(line for line in rank.output().splitlines() if not line.startswith("[rank"))
            sent = "".join(map(str, rank.messages))
            parts.append(f"[rank {number}] {end or f'exit code {rank.exit_code}'}\n{sent}{output}".rstrip())
        return "\n".join(parts)


RankMain = Callable[[int, str, Path, processes.Connection], None]
Judge = Callable[[Running], Result]


def run_all(
    names: Iterable[str], world_size: int, main: RankMain, judge: Judge, limit: float, jobs: int
) -> Iterator[tuple[str, Result]]:
    """Yields (name, result) as tests end, at most `jobs` at once, each within `limit` seconds."""
    waiting = list(reversed(list(names)))
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(), world_size, main, limit))
            everyone = [rank for test in running for rank in test.ranks]
            processes.wait_any(everyone, min(test.deadline for test in running))
            for test in list(running):
                ended = [processes.collect(rank) for rank in test.ranks]
                failed = [rank.ended for rank in test.ranks if rank.failed]
                if failed:
                    test.deadline = min(test.deadline, min(failed) + GRACE)
                if not all(ended) and time.monotonic() > test.deadline:
                    test.timed_out = not failed
                    for rank in test.ranks:
                        processes.kill(rank)
                    ended = [True]
                if all(ended):
                    running.remove(test)
                    yield test.name, judge(test)
                    shutil.rmtree(test.directory, ignore_errors=True)
    finally:
        for test in running:
            for rank in test.ranks:
                processes.kill(rank)
            shutil.rmtree(test.directory, ignore_errors=True)


def _start(name: str, world_size: int, main: RankMain, limit: float) -> Running:
    directory = Path(tempfile.mkdtemp(prefix="conformance-"))
    started = time.monotonic()

    def rank_main(rank: int) -> Callable[[processes.Connection], None]:
        return lambda pipe: main(rank, name, directory, pipe)

    ranks = [processes.fork(rank_main(rank), directory / f"rank{rank}.log", limit) for rank in range(world_size)]
    return Running(name, directory, started, started + limit, ranks)
