"""Times collectives of one backend beside gloo's, in one run, the two taking turns.

    torchrun --standalone --nproc-per-node 4 examples/times.py

Sizes are nccl-tests' convention: the whole buffer of a rank (all_gather's output, reduce_scatter's input). Times are
those of the slowest rank, the median of the repeats. A repeat of a small size is many calls, as a training step makes
them: a single one, of ranks that leave a barrier one after another, would time their leaving.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = {64: (10, 50), 64 << 10: (10, 25), 1 << 20: (8, 5), 64 << 20: (5, 1)}
"""Bytes: repeats, and calls in each."""


def timed(call: Callable[[], object], calls: int, settle: dist.ProcessGroup) -> float:
    """Seconds per call, of calls one after another that all ranks start together."""
    dist.barrier(settle)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def calls(size: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """The operations on float32 buffers of `size` bytes per rank."""
    whole = torch.ones(size // 4)
    part = torch.ones(size // 4 // ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }


def main() -> None:
    """One rank's run; rank 0 prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "tpu"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    ours, gloo = (dist.new_group(backend=backend) for backend in (args.backend, "gloo"))
    assert isinstance(ours, dist.ProcessGroup) and isinstance(gloo, dist.ProcessGroup)
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    if first:
        print(f"{ranks} ranks, float32; p50 in ms")
        print(f"{'operation':16}{'bytes':>12}{args.backend:>12}{'gloo':>12}{'gloo / ' + args.backend:>14}")
    for name in calls(64, ranks, gloo):
        for size, (repeats, batch) in SIZES.items():
            call = [calls(size, ranks, group)[name] for group in (ours, gloo)]
            samples = torch.zeros(2, repeats, dtype=torch.float64)
            for repeat in range(-1, repeats):  # the first round warms up
                for side, run in enumerate(call):
                    seconds = timed(run, batch, gloo)
                    if repeat >= 0:
                        samples[side, repeat] = seconds
            dist.all_reduce(samples, dist.ReduceOp.MAX, group=gloo)
            mine, theirs = (statistics.median(row.tolist()) * 1e3 for row in samples)
            if first:
                print(f"{name:16}{size:>12,}{mine:>12.3f}{theirs:>12.3f}{theirs / mine:>13.1f}x", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
