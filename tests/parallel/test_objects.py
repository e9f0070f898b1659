"""Object collectives: what arrives is what was sent, on the default group and on a subset."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.world import World

MEMBERS = [1, 2, 3]


def thing(rank: int) -> dict[str, Any]:
    """Of a size of its own: none, small, and larger than a shared-memory ring."""
    return {
        "rank": rank,
        "text": "ä" * (0, 10, 3000, 700_000)[rank],
        "tensor": torch.arange(float(rank)),
        "nothing": None,
        "shape": torch.Size([rank, 2]),
    }


def equal(got: Any, want: dict[str, Any]) -> bool:
    keys = ("rank", "text", "nothing", "shape")
    return all(got[key] == want[key] for key in keys) and torch.equal(got["tensor"], want["tensor"])


def objects(subset: bool) -> None:
    rank = dist.get_rank()
    ranks = MEMBERS if subset else [0, 1, 2, 3]
    group: Any = dist.new_group(ranks) if subset else None
    if rank not in ranks:
        return
    first, last, size = ranks[0], ranks[-1], len(ranks)

    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, thing(rank), group=group)
    assert all(equal(got, thing(r)) for got, r in zip(everything, ranks, strict=True))

    gathered: list[Any] | None = [None] * size if rank == last else None
    dist.gather_object(thing(rank), gathered, dst=last, group=group)
    if gathered is not None:
        assert all(equal(got, thing(r)) for got, r in zip(gathered, ranks, strict=True))

    for root in ranks:
        spread: list[Any] = [thing(root), root, "end"] if rank == root else [None, None, None]
        dist.broadcast_object_list(spread, src=root, group=group)
        assert equal(spread[0], thing(root)) and spread[1:] == [root, "end"]

    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [thing(r) for r in ranks] if rank == first else None, src=first, group=group)
    assert equal(dealt[0], thing(rank))

    # Around the ring; even places send first.
    place = ranks.index(rank)
    after, before = ranks[(place + 1) % size], ranks[place - 1]
    received: list[Any] = [None, None]
    if place % 2 == 0:
        dist.send_object_list([thing(rank), rank], dst=after, group=group)
        dist.recv_object_list(received, src=before, group=group)
    else:
        dist.recv_object_list(received, src=before, group=group)
        dist.send_object_list([thing(rank), rank], dst=after, group=group)
    assert equal(received[0], thing(before)) and received[1] == before


def test_default_group(four: World) -> None:
    """All six object collectives from every root: dictionaries of 0 to 1.4 MB with text, tensors and sizes."""
    four.run(objects, False)


def test_subset(four: World) -> None:
    """The same on ranks 1, 2 and 3, roots named by their global ranks."""
    four.run(objects, True)


def by_group_rank() -> None:
    group: Any = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return
    spread: list[Any] = [thing(2)] if dist.get_rank() == 2 else [None]
    dist.broadcast_object_list(spread, group_src=1, group=group)
    assert equal(spread[0], thing(2))
    gathered: list[Any] | None = [None, None] if dist.get_rank() == 1 else None
    dist.gather_object(dist.get_rank(), gathered, group_dst=0, group=group)
    assert gathered in (None, [1, 2])


def test_roots_by_group_rank(four: World) -> None:
    """group_src and group_dst count within the group: objects received."""
    four.run(by_group_rank)
