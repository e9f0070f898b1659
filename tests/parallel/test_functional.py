"""Functional collectives, eager and compiled, with gradients: against the same arithmetic on all ranks' inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.parallel.world import World


def inputs(ranks: int) -> list[Tensor]:
    """Each rank's input; powers of two times small integers, so that sums and means are exact."""
    return [(torch.arange(4.0 * ranks).reshape(2 * ranks, 2) + r) / 4 for r in range(ranks)]


def chain(x: Tensor) -> tuple[Tensor, ...]:
    """Every functional collective once."""
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    half = x.shape[0] // ranks
    summed = funcol.all_reduce(x * 2, "sum", group)
    most = funcol.all_reduce(x, "max", group)
    mean = funcol.all_reduce(x, "avg", group)
    gathered = funcol.all_gather_tensor(x, 0, group)
    beside = funcol.all_gather_tensor(x, 1, group)
    scattered = funcol.reduce_scatter_tensor(x, "sum", 0, group)
    exchanged = funcol.all_to_all_single(x, None, None, group)
    spread = funcol.broadcast(x, 1, group)
    pair = funcol.all_reduce_coalesced([x, x + 1], "sum", group)
    two = funcol.all_gather_into_tensor_coalesced([x, x[:half]], group)
    parts = funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    # torch counts elements where rows are meant, so only one dimension can be permuted.
    shifted = funcol.permute_tensor(x.flatten(), [(r + 1) % ranks for r in range(ranks)], group)
    results = (summed, most, mean, gathered, beside, scattered, exchanged, spread, *pair, *two, *parts, shifted)
    return tuple(funcol.wait_tensor(result) + 0.5 for result in results)


def wanted(rank: int, ranks: int) -> list[Tensor]:
    """The same from all ranks' inputs."""
    xs = inputs(ranks)
    stack = torch.stack(xs)
    total, half = stack.sum(0), xs[0].shape[0] // ranks
    mine = slice(rank * half, (rank + 1) * half)
    results = [
        total * 2,
        stack.amax(0),
        total / ranks,
        torch.cat(xs, 0),
        torch.cat(xs, 1),
        total[mine],
        torch.cat([x[mine] for x in xs]),
        xs[1],
        total,
        total + ranks,
        torch.cat(xs),
        torch.cat([x[:half] for x in xs]),
        total[mine],
        total[mine] * 2,
        xs[(rank - 1) % ranks].flatten(),
    ]
    return [result + 0.5 for result in results]


def hold(got: tuple[Tensor, ...], rank: int, ranks: int) -> None:
    want = wanted(rank, ranks)
    assert len(got) == len(want)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), f"result {number}: expected {other}, got {one}"


def eager() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hold(chain(inputs(ranks)[rank]), rank, ranks)


def test_eager(four: World) -> None:
    """15 results, from all-reduce to permute: equal to the same from all inputs."""
    four.run(eager)


def compiled() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.compile(chain, fullgraph=True)
    for _ in range(2):
        hold(whole(inputs(ranks)[rank]), rank, ranks)


def test_compiled(two: World) -> None:
    """The same in one graph of torch.compile, run twice."""
    two.run(compiled, timeout=150)


def traceable() -> None:
    """c10d's own calls inside a compiled function: dynamo turns them into functional ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(x: Tensor, out: Tensor) -> Tensor:
        y = x.sin()
        dist.all_reduce(y)
        dist.all_gather_into_tensor(out, y[:1].contiguous())
        return out * 2 + y.sum()

    x = inputs(ranks)[rank]
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, torch.zeros(ranks, 2))
    torch.testing.assert_close(got, step(x.clone(), torch.zeros(ranks, 2)))
    total = torch.stack(inputs(ranks)).sin().sum(0)
    torch.testing.assert_close(got, total[:1].expand(ranks, 2) * 2 + total.sum())


def test_c10d_calls_compiled(two: World) -> None:
    """all_reduce and all_gather_into_tensor in a compiled function: against eager, and against all inputs."""
    two.run(traceable, timeout=90)


def gradients() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    xs = inputs(ranks)
    half = xs[0].shape[0] // ranks
    mine = slice(rank * half, (rank + 1) * half)

    def leaf() -> Tensor:
        return xs[rank].clone().requires_grad_()

    # Rank r's loss weighs its result by r + 1; gradients add up over the ranks that used an element.
    x = leaf()
    (funcol.all_gather_tensor_autograd(x, 0, group) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, float(sum(range(1, ranks + 1)))))

    x = leaf()
    (funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group) * (rank + 1)).sum().backward()
    weights = torch.arange(1.0, ranks + 1).repeat_interleave(half)[:, None].expand_as(x)
    assert x.grad is not None and torch.equal(x.grad, weights)

    x = leaf()
    (funcol.all_to_all_single_autograd(x, None, None, group) * (rank + 1)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weights)
    assert x.grad[mine].unique().tolist() == [float(rank + 1)]


def test_gradients(four: World) -> None:
    """Gradients through all-gather, reduce-scatter and all-to-all: the weights of all ranks' losses."""
    four.run(gradients)
