"""One rank of `podring bench`: `python -m podring._bench_worker`, started by the command, never by hand.

The plan comes as one line of JSON on stdin, which then stays open: its end means that the command died, and this
process leaves too. Rank 0 reports on stdout, one JSON object a line. docs/bench.md says what is measured and how.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import itertools
import json
import mmap
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist

from podring import _bench_pattern as pattern

Run = Callable[[], object]

# A batch is long enough that neither the clock nor what comes before it shows in its average: the ranks' meeting, and
# what the other backend has left behind. With more ranks than cores that is caches and where the scheduler has put the
# ranks, which it sees to every 30 ms or so. Backends have batches of the same length, not of as many calls: else the
# faster one would run in what the slower one leaves behind, and seldom the other way round.
BATCH_NS = 50_000_000
MIN_ROUNDS = 5
MAX_ROUNDS = 201
WARMUP_NS = 50_000_000
MAX_WARMUP = 20


class Board:
    """A page of memory shared by the ranks, through which they meet and agree without using any backend.

    Each rank has a cache line of 64-bit words that only it writes. Words 0 and 1 carry `sequence << 48 | value` of its
    last two exchanges (two, because a rank may be one exchange ahead of its slowest reader); word 2 counts the
    barriers under test that it has entered.
    """

    WORDS = 8
    VALUE = (1 << 48) - 1

    def __init__(self, path: str, rank: int, size: int, timeout: float) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size * self.WORDS * 8)
        self._words = memoryview(self._map).cast("Q")
        self._rank, self._size, self._timeout = rank, size, timeout
        self._sequence = 0

    def exchange(self, value: int = 0, *, spin: bool = False) -> list[int]:
        """Every rank's value, once all have come. With `spin` the ranks leave as close together as they can."""
        self._sequence += 1
        tag = self._sequence & 0x7FFF
        slot = self._sequence & 1
        self._words[self._rank * self.WORDS + slot] = tag << 48 | min(value, self.VALUE)
        values = [0] * self._size
        deadline = time.monotonic() + self._timeout
        for rank in range(self._size):
            index = rank * self.WORDS + slot
            turns = 0
            while (word := self._words[index]) >> 48 != tag:
                turns += 1
                if spin and turns < 20_000:
                    os.sched_yield()
                else:
                    time.sleep(100e-6)
                if turns & 0xFF == 0 and time.monotonic() > deadline:
                    missing = [r for r in range(self._size) if self._words[r * self.WORDS + slot] >> 48 != tag]
                    raise TimeoutError(f"ranks {missing} did not come within {self._timeout:g} s")
            values[rank] = word & self.VALUE
        return values

    def enter(self) -> int:
        """Counts one more barrier of this rank's, and returns which it is."""
        index = self._rank * self.WORDS + 2
        self._words[index] += 1
        return self._words[index]

    def absent(self, turn: int) -> int:
        """How many ranks have not entered barrier number `turn`."""
        return sum(self._words[rank * self.WORDS + 2] < turn for rank in range(self._size))


def reduce_op(name: str | None) -> Any:
    """torch's reduction for the plan's name."""
    if name is None:
        return None
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(pattern.PREMUL_FACTOR)
    return getattr(dist.ReduceOp, name)


class Case:
    """One (operation, size): its buffers, made once and shared by the backends, its calls and its check."""

    def __init__(self, plan: dict[str, Any], rank: int, size: int, board: Board) -> None:
        self.id: int = plan["id"]
        self.op: str = plan["op"]
        self.redop: str | None = plan["redop"]
        self._rank, self._size, self._board = rank, size, board
        count: int = plan["count"]
        block = count // size
        dtype: torch.dtype = getattr(torch, plan["dtype"])
        reduces = self.op in ("all_reduce", "reduce", "reduce_scatter")
        self._values = pattern.Pattern(dtype, size, self.redop if reduces else None)
        root = rank == 0
        # Elements this rank puts in and gets out; 0 where the operation has no such buffer, or works in the other.
        need: dict[str, tuple[int, int]] = {
            "all_reduce": (0, count),
            "all_gather": (block, count),
            "reduce_scatter": (count, block),
            "all_to_all": (count, count),
            "broadcast": (0, count),
            "reduce": (0, count),
            "gather": (block, count if root else 0),
            "scatter": (count if root else 0, block),
            "sendrecv": (count, count),
            "barrier": (0, 0),
        }
        sent, received = need[self.op]
        self._block = block
        self._in = torch.empty(sent, dtype=dtype)
        self._out = torch.empty(received, dtype=dtype)

    def fill(self) -> None:
        """Known inputs, and outputs that hold none of the expected values."""
        rank, values = self._rank, self._values
        pattern.poison(self._out)
        if self.op in ("all_reduce", "reduce") or (self.op == "broadcast" and rank == 0):
            values.fill(self._out, rank)
        elif self.op in ("reduce_scatter", "all_to_all", "scatter"):
            for block, part in enumerate(self._in.split(self._block)):
                values.fill(part, rank, block)
        else:
            values.fill(self._in, rank)

    def wrong(self) -> int:
        """How many elements of this rank's output differ from what the inputs make them."""
        rank, size, values, out = self._rank, self._size, self._values, self._out
        if self.op == "reduce" and rank != 0:
            return 0
        if self.op in ("all_reduce", "reduce"):
            return values.wrong(out, values.reduced())
        if self.op == "reduce_scatter":
            return values.wrong(out, values.reduced(rank))
        if self.op in ("all_gather", "gather"):
            return sum(values.wrong(part, values.sent(peer)) for peer, part in enumerate(out.split(self._block)))
        if self.op == "all_to_all":
            return sum(values.wrong(part, values.sent(peer, rank)) for peer, part in enumerate(out.split(self._block)))
        if self.op == "scatter":
            return values.wrong(out, values.sent(0, rank))
        if self.op == "sendrecv":
            return values.wrong(out, values.sent((rank - 1) % size))
        return values.wrong(out, values.sent(0))

    def run(self, group: dist.ProcessGroup) -> Run:
        """The call to be timed, with everything prepared that can be prepared outside it."""
        partial, sent, out = functools.partial, self._in, self._out
        redop = reduce_op(self.redop)
        if self.op == "barrier":
            return partial(dist.barrier, group)
        if self.op == "all_reduce":
            return partial(dist.all_reduce, out, redop, group)
        if self.op == "reduce":
            return partial(dist.reduce, out, 0, redop, group)
        if self.op == "broadcast":
            return partial(dist.broadcast, out, 0, group)
        if self.op == "all_gather":
            return partial(dist.all_gather_into_tensor, out, sent, group)
        if self.op == "reduce_scatter":
            return partial(dist.reduce_scatter_tensor, out, sent, redop, group)
        if self.op == "all_to_all":
            return partial(dist.all_to_all_single, out, sent, group=group)
        if self.op == "gather":
            parts = list(out.split(self._block)) if self._rank == 0 else None
            return partial(dist.gather, sent, parts, 0, group)
        if self.op == "scatter":
            parts = list(sent.split(self._block)) if self._rank == 0 else None
            return partial(dist.scatter, out, parts, 0, group)
        ops = [
            dist.P2POp(dist.isend, sent, (self._rank + 1) % self._size, group),
            dist.P2POp(dist.irecv, out, (self._rank - 1) % self._size, group),
        ]

        def send_and_receive() -> None:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return send_and_receive

    def check(self, run: Run) -> int:
        """Runs once from known inputs; wrong elements of all ranks together."""
        if self.op == "barrier":
            return self._check_barrier(run)
        self.fill()
        self._board.exchange()
        run()
        return sum(self._board.exchange(self.wrong()))

    def _check_barrier(self, run: Run) -> int:
        """Each rank is late once: ranks that had not entered when a rank came out."""
        wrong = 0
        for late in range(self._size):
            self._board.exchange()
            if late == self._rank:
                time.sleep(0.002)
            turn = self._board.enter()
            run()
            wrong += self._board.absent(turn)
        return sum(self._board.exchange(wrong))


class Alive:
    """Says at most once a second that this rank moves: to the command (rank 0), and to the traceback timer."""

    def __init__(self, timeout: float, report: Callable[..., None]) -> None:
        self._timeout, self._report = timeout, report
        self._last = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= 1:
            self._last = now
            faulthandler.dump_traceback_later(self._timeout, exit=True)
            self._report(event="alive")


def batch(board: Board, run: Run, iterations: int) -> int:
    """Nanoseconds per iteration of the slowest rank, over `iterations` calls issued back to back."""
    board.exchange(spin=True)
    start = time.perf_counter_ns()
    for _ in itertools.repeat(None, iterations):
        run()
    spent = time.perf_counter_ns() - start
    # In eighths of a nanosecond: the board carries integers, and a tiny batch average would lose its fraction.
    return max(board.exchange(spent * 8 // iterations))


def measure(case: Case, runs: list[Run], plan: dict[str, Any], board: Board, alive: Alive) -> list[dict[str, Any]]:
    """Checks, warms up, times (backends taking turns, batch by batch) and checks again. One result per run."""
    wrong = [case.check(run) for run in runs]
    estimates = []
    for run in runs:
        alive()
        warmup: int | None = plan["warmup"]
        if warmup is None:
            first = batch(board, run, 1) // 8
            warmup = max(1, min(MAX_WARMUP, WARMUP_NS // max(first, 1)))
        estimates.append(max(batch(board, run, warmup) // 8, 1) if warmup else BATCH_NS)
    iters: int | None = plan["iters"]
    sizes = [max(1, min(iters or BATCH_NS, BATCH_NS // estimate)) for estimate in estimates]
    if iters is None:
        spent = sum(size * estimate for size, estimate in zip(sizes, estimates, strict=True))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(plan["seconds"] * 1e9) // spent))
    else:
        rounds = -(-iters // min(sizes))
    times: list[list[int]] = [[] for _ in runs]
    for _ in range(rounds):
        for slot, run in enumerate(runs):
            alive()
            times[slot].append(batch(board, run, sizes[slot]))
    for slot, run in enumerate(runs):
        alive()
        wrong[slot] += case.check(run)
    return [
        {"p50_us": statistics.median(samples) / 8e3, "wrong": bad} for samples, bad in zip(times, wrong, strict=True)
    ]


def groups(plan: dict[str, Any], rank: int, size: int, board: Board) -> list[dist.ProcessGroup]:
    """One group over all ranks per backend, over a store of rank 0's on a free port."""
    timeout = datetime.timedelta(seconds=plan["timeout_s"])
    port = 0
    server = None
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
        port = server.port
    port = board.exchange(port)[0]
    store = server or dist.TCPStore("127.0.0.1", port, size, False, timeout)
    made: list[dist.ProcessGroup] = []
    for backend in plan["backends"]:
        group: Any
        if made:
            group = dist.new_group(backend=backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            group = dist.group.WORLD
        made.append(group)
    return made


def reporter(rank: int) -> Callable[..., None]:
    """Rank 0's way to the command: the real stdout, which nothing else writes to from here on."""
    out: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(**event: Any) -> None:
        if rank == 0:
            print(json.dumps(event), file=out, flush=True)

    return report


def leave_with_parent() -> None:
    """Ends this process when the command has: its end of our stdin closes, however it died."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.register(signal.SIGUSR1)  # the command asks for the stack of a rank it is about to give up on
    report = reporter(rank)
    line = bytearray()  # read byte by byte: a buffered reader would hold stdin's lock while leave_with_parent reads
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or sys.exit("the plan ended early")
    plan = json.loads(line)
    leave_with_parent()
    torch.set_num_threads(1)
    timeout: float = plan["timeout_s"]
    alive = Alive(timeout, report)
    alive()
    board = Board(plan["board"], rank, size, timeout)
    members = groups(plan, rank, size, board)
    board.exchange()
    report(event="ready")
    gc.disable()
    for described in plan["cases"]:
        alive()
        report(event="start", id=described["id"])
        case = Case(described, rank, size, board)
        results = measure(case, [case.run(group) for group in members], plan, board, alive)
        report(event="result", id=case.id, backends=results)
        del case
        gc.collect()
    board.exchange()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    report(event="done")


if __name__ == "__main__":
    main()
