"""Times init_process_group and new_group: `python -m podring._bench_init`, started by `podring bench rendezvous`.

The plan comes as one line of JSON on stdin: {"ranks": [2, 4, 8], "rounds": 7, "groups": 16, "timeout_s": 60}. The
result goes to stdout as one line of JSON, in milliseconds, by backend and number of ranks.

Ranks are forked from this process, which has torch loaded and no backend in use, so that each init_process_group is
the first of its process, as in a job. A launcher's ranks have loaded torch themselves, so each first makes the memory
that fork shares with this process its own: otherwise init would pay for copying every page that it is the first to
touch, half of its time. This process has the launcher's store, as torchrun's agent has, so that no rank waits for rank
0's to listen. The backends take turns, round by round. A time is from the moment at which all ranks have met to the
return of the slowest rank; what is reported is the median over the rounds.

torch looks for a backend by name in the metadata of every installed package, for gloo too, unless somebody has
registered it before. What that takes is part of "init", as for any user, and also shown by itself ("discovery").
"""

from __future__ import annotations

import ctypes
import datetime
import json
import mmap
import os
import signal
import statistics
import sys
import time
import traceback
from array import array
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

BACKENDS = ["tpu", "gloo"]
WORDS = 4
"""64-bit words of a rank's line: meetings it has come to, and what it measured last, in nanoseconds."""


POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, since 5.14: pages as if each had been written to."""


def own_pages() -> list[tuple[int, int]]:
    """Address and length, in bytes, of the stretches of private memory that this process has pages for."""
    stretches: list[tuple[int, int]] = []
    size = mmap.PAGESIZE
    with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", buffering=0) as pages:
        for line in maps.readlines():
            where, mode, *_ = line.split()
            if mode != "rw-p":
                continue
            start, end = (int(address, 16) for address in where.split("-"))
            pages.seek(start // size * 8)
            present = [entry >> 63 for entry in array("Q", pages.read((end - start) // size * 8))]
            for at, here in enumerate(present):
                if not here:
                    continue
                if at and present[at - 1]:
                    stretches[-1] = (stretches[-1][0], stretches[-1][1] + size)
                else:
                    stretches.append((start + at * size, size))
    return stretches


def take(stretches: list[tuple[int, int]]) -> None:
    """Gives this forked process copies of its parent's pages. Where the kernel can't, it copies as they are touched."""
    libc = ctypes.CDLL(None)
    for start, length in stretches:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(POPULATE_WRITE))


class Page:
    """Memory shared with the forked ranks, through which they meet without using any backend."""

    def __init__(self, ranks: int) -> None:
        self._map = mmap.mmap(-1, ranks * WORDS * 8)
        self.words = memoryview(self._map).cast("Q")
        self.ranks = ranks

    def meet(self, rank: int, timeout: float) -> None:
        """Returns when every rank has come."""
        self.words[rank * WORDS] += 1
        turn = self.words[rank * WORDS]
        end = time.monotonic() + timeout
        while any(self.words[other * WORDS] < turn for other in range(self.ranks)):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank}: not all ranks came")
            time.sleep(50e-6)

    def slowest(self, rank: int, nanoseconds: int, timeout: float) -> float:
        """The longest of the ranks' times, in milliseconds."""
        self.words[rank * WORDS + 1] = nanoseconds
        self.meet(rank, timeout)
        longest = max(self.words[other * WORDS + 1] for other in range(self.ranks))
        self.meet(rank, timeout)
        return longest / 1e6


def one_rank(page: Page, rank: int, backend: str, plan: dict[str, Any], out: int) -> None:
    """Measures, and writes to `out` if this is rank 0."""
    torch.set_num_threads(1)
    ranks, timeout = page.ranks, float(plan["timeout_s"])
    limit = datetime.timedelta(seconds=timeout)

    def timed(act: Callable[[], object]) -> float:
        """Milliseconds from the moment at which all ranks have come to the slowest rank's return."""
        page.meet(rank, timeout)
        began = time.perf_counter_ns()
        act()
        return page.slowest(rank, time.perf_counter_ns() - began, timeout)

    search = dist.Backend._ensure_backend_registered
    searched = [0]

    def timed_search(name: str) -> None:
        began = time.perf_counter_ns()
        search(name)
        searched[0] += time.perf_counter_ns() - began

    with mock.patch.object(dist.Backend, "_ensure_backend_registered", timed_search):
        init = timed(lambda: dist.init_process_group(backend, timeout=limit))
    discovery = page.slowest(rank, searched[0], timeout)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if tensor.item() != ranks:
        raise AssertionError(f"rank {rank}: all_reduce gave {tensor.item()}, not {ranks}")

    groups: list[float] = []
    barriers: list[float] = []
    _, store = c10d._world.pg_map[c10d._get_default_group()]
    members = list(range(ranks))
    made: list[Any] = []

    def make() -> None:
        made.append(dist.new_group(members))

    def hold() -> None:
        c10d._store_based_barrier(rank, store, c10d.GroupName(f"bench{len(barriers)}"), ranks, limit)

    for _ in range(plan["groups"]):
        groups.append(timed(make))
        barriers.append(timed(hold))
        dist.destroy_process_group(made.pop())
    page.meet(rank, timeout)
    dist.destroy_process_group()
    if rank == 0:
        # The first is left out: it may pay for what the later ones find done.
        result = {
            "discovery": discovery,
            "init": init,
            "new_group": statistics.median(groups[1:] or groups),
            "barrier": statistics.median(barriers[1:] or barriers),
        }
        os.write(out, json.dumps(result).encode())


def one_round(ranks: int, backend: str, plan: dict[str, Any]) -> dict[str, float]:
    """Forks the ranks, and gives what they measured."""
    page = Page(ranks)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = own_pages()
    # As torchrun tells its workers.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        WORLD_SIZE=str(ranks),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    reader, writer = os.pipe()
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reader)
                os.environ["RANK"] = str(rank)
                take(shared)
                one_rank(page, rank, backend, plan, writer)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[child] = rank
    os.close(writer)
    end = time.monotonic() + 2 * float(plan["timeout_s"])
    failed = []
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = children.pop(child)
            if status:
                failed.append(rank)
        elif time.monotonic() > end:
            failed += children.values()
        else:
            time.sleep(0.002)
        if failed:
            for left in children:
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
            break
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    if failed:
        raise SystemExit(f"{backend} with {ranks} ranks: rank {failed[0]} failed")
    result: dict[str, float] = json.loads(text)
    return result


def main() -> None:
    """Reads the plan, measures, and prints."""
    plan = json.loads(sys.stdin.readline())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    held = bool(c10d._is_barrier_after_init())
    medians: dict[str, dict[str, list[float]]] = {"discovery": {}, "init": {}, "new_group": {}, "barrier": {}}
    for ranks in plan["ranks"]:
        measured: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
        for turn in range(plan["rounds"]):
            for backend in BACKENDS[:: 1 if turn % 2 == 0 else -1]:
                measured[backend].append(one_round(ranks, backend, plan))
        for what, by_ranks in medians.items():
            by_ranks[str(ranks)] = [statistics.median(one[what] for one in measured[name]) for name in BACKENDS]
    # torch holds its own store barrier in new_group only if it was asked to.
    print(json.dumps({**medians, "barrier_held": held}), flush=True)


if __name__ == "__main__":
    main()
