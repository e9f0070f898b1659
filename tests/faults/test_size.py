"""More than 2^31 elements, more than 2^32 bytes, more than 256 ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run

ELEMENTS = (1 << 31) + 3
BYTES = (1 << 32) + 3
PERIOD = 251
"""A prime, so that a piece that lands elsewhere is seen."""
CHUNK = PERIOD << 18


def tile(first: int) -> Tensor:
    """first, first + 1, … first + 250, again and again."""
    pattern = torch.arange(first, first + PERIOD) % PERIOD
    return pattern.to(torch.uint8).repeat(CHUNK // PERIOD)


def fill(tensor: Tensor, first: int) -> None:
    """Element i is (first + i) mod 251. In place, without memory of its size."""
    pattern = tile(first)
    for piece in tensor.split(CHUNK):
        piece.copy_(pattern[: len(piece)])


def holds(tensor: Tensor, pattern: Tensor) -> bool:
    """Whether the tensor is the pattern, again and again."""
    return all(torch.equal(piece, pattern[: len(piece)]) for piece in tensor.split(CHUNK))


def test_more_elements_and_bytes_than_32_bits_count() -> None:
    """One tensor of 2^32 + 3 bytes per rank, used for all: a sum over 2^31 + 3 elements, a broadcast of all of it, the
    same by send and receive."""

    def body() -> dict[str, bool]:
        rank = dist.get_rank()
        whole = torch.empty(BYTES, dtype=torch.uint8)
        found = {}
        part = whole[:ELEMENTS]
        fill(part, rank)
        dist.all_reduce(part)
        found["all_reduce"] = holds(part, tile(0) + tile(1))
        if rank == 0:
            fill(whole, 7)
        dist.broadcast(whole, 0)
        found["broadcast"] = rank == 0 or holds(whole, tile(7))
        ends = [slice(0, CHUNK), slice(BYTES - CHUNK, BYTES)]
        if rank == 1:
            dist.send(whole, 0)
        else:
            for end in ends:
                whole[end] = 0
            dist.recv(whole, 1)
        found["send"] = all(holds(whole[end], tile((7 + end.start) % PERIOD)) for end in ends)
        dist.barrier()
        return found

    assert run(body, 2, timeout=120, op_timeout=60) == [dict.fromkeys(("all_reduce", "broadcast", "send"), True)] * 2


def test_more_than_256_ranks() -> None:
    """257 ranks on one machine: a sum, a broadcast from the last, a gathering of everybody's number."""
    ranks = 257

    def body() -> list[bool]:
        rank = dist.get_rank()
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)
        last = torch.tensor([rank])
        dist.broadcast(last, ranks - 1)
        numbers = torch.empty(ranks, dtype=torch.int64)
        dist.all_gather_into_tensor(numbers, torch.tensor([rank]))
        return [
            total.tolist() == [ranks * (ranks - 1) / 2] * 3,
            last.item() == ranks - 1,
            torch.equal(numbers, torch.arange(ranks)),
        ]

    # Most of the time goes into 257 Python processes on two cores finding each other.
    assert run(body, ranks, timeout=120, op_timeout=90) == [[True] * 3] * ranks
