"""Ranks that stay: one forked world runs many scenarios, one after another, each a test of its own.

Forming a world and loading what FSDP or the compiler load lazily costs more than most scenarios do. A scenario that
fails, or doesn't end, takes its world with it; the next one gets a fresh world.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import processes
from tests.harness import BACKEND, GRACE, RankEnv, RanksFailed

OP_TIMEOUT = 30.0
"""Seconds that the default group gives a collective."""
LEAVE = 10.0
"""Seconds that ranks get to destroy their groups at the end."""


class World:
    """`ranks` processes with a default group; rank_env(rank) is put into each one's environment first."""

    def __init__(self, ranks: int, rank_env: RankEnv | None = None) -> None:
        self.ranks = ranks
        self._rank_env = rank_env or (lambda rank: {})
        self._running: list[processes.Rank] = []
        self._directory: Path | None = None

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What body(*args) returned on each rank, in rank order; RanksFailed, with all output, unless it returned on
        all of them. `body` is a function of a module, so that the ranks find it by its name."""
        if not self._running:
            self._start()
        call = pickle.dumps((body, args, timeout))
        for rank in self._running:
            rank.messages.clear()
            rank.pipe.send(call)
        answers = self._answers(time.monotonic() + timeout)
        if all(how == "returned" for how, _ in answers):
            return [value for _, value in answers]
        lines = []
        for number, (how, what) in enumerate(answers):
            text = (what if how == "raised" else "") + self._running[number].output()
            lines += [f"[rank {number}] {line}" for line in [how, *_of_the_scenario(text)]]
        self.kill()
        raise RanksFailed("\n" + "\n".join(lines))

    def close(self) -> None:
        """Every rank destroys its groups and leaves; RanksFailed if one cannot."""
        until = time.monotonic() + LEAVE
        for rank in self._running:
            rank.pipe.send(None)
        while not all([processes.collect(rank) for rank in self._running]) and time.monotonic() < until:
            processes.wait_any(self._running, until)
        codes = [rank.exit_code for rank in self._running]
        output = "".join(rank.output() for rank in self._running)
        self.kill()
        if any(code != 0 for code in codes):
            raise RanksFailed(f"exit codes at the end of the world: {codes}\n{output}")

    def kill(self) -> None:
        """Ends all ranks at once."""
        for rank in self._running:
            processes.kill(rank)
        self._running.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="podring-world-"))
        store = self._directory / "store"

        def rank_main(rank: int) -> Callable[[processes.Connection], None]:
            return lambda pipe: _serve(pipe, rank, self.ranks, store, self._rank_env(rank))

        logs = [self._directory / f"rank{rank}.log" for rank in range(self.ranks)]
        self._running = [processes.fork(rank_main(rank), logs[rank], 3600) for rank in range(self.ranks)]

    def _answers(self, until: float) -> list[tuple[str, Any]]:
        """One (how, value or trace) per rank; those that haven't answered by then are said not to have ended."""
        while True:
            ended = [processes.collect(rank) for rank in self._running]
            answers = [pickle.loads(rank.messages[-1]) if rank.messages else None for rank in self._running]
            if any(end for end in ended) or any(answer and answer[0] == "raised" for answer in answers):
                until = min(until, time.monotonic() + GRACE)
            if all(answer or end for answer, end in zip(answers, ended, strict=True)) or time.monotonic() > until:
                break
            processes.wait_any(self._running, until)
        return [answer or ("died" if end else "did not end", None) for answer, end in zip(answers, ended, strict=True)]


def _of_the_scenario(text: str) -> Iterator[str]:
    """Lines of output, without what a dumped stack has of the parent from before the fork."""
    parents = False
    for line in text.splitlines():
        parents = (parents or " in _serve" in line) and line.startswith("  File")
        if not parents:
            yield line


def _serve(pipe: processes.Connection, rank: int, ranks: int, store: Path, env: Mapping[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=OP_TIMEOUT),
    )
    while (call := pipe.recv()) is not None:
        body, args, timeout = pickle.loads(call)
        # Where each thread stands, if the scenario doesn't end.
        faulthandler.dump_traceback_later(max(timeout - 1.0, 1.0), file=2)
        torch.manual_seed(0)
        try:
            answer = ("returned", body(*args))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        pipe.send(pickle.dumps(answer))
    dist.destroy_process_group()
