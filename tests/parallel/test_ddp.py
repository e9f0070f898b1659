"""DistributedDataParallel and ZeroRedundancyOptimizer: the parameters after some steps against one process's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.parallel.model import WIDTH, Net, alone, batch, close, same, sgd, state, train
from tests.parallel.world import World


def wrapped(options: dict[str, Any]) -> None:
    net = DistributedDataParallel(Net(), **options)
    train(net, sgd(net.parameters()), dist.get_rank(), dist.get_world_size())
    same(state(net), alone())


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"static_graph": True, "bucket_cap_mb": 0.001},
        {"broadcast_buffers": False, "init_sync": False},
    ],
    ids=str,
)
def test_options(four: World, options: dict[str, Any]) -> None:
    """Parameters after 3 steps on quarters of the batch, many buckets or one, against whole batches alone."""
    four.run(wrapped, options)


def differing_start() -> None:
    net = Net()
    if dist.get_rank() != 0:
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
    wrapper = DistributedDataParallel(net)
    train(wrapper, sgd(wrapper.parameters()), dist.get_rank(), 2)
    same(state(wrapper), alone())


def test_rank_0_gives_the_first_weights(two: World) -> None:
    """A rank that begins with zeros ends with the parameters of one process that began with rank 0's."""
    two.run(differing_start)


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


def unused() -> None:
    rank, x = dist.get_rank(), torch.arange(24.0).reshape(4, 6) / 10
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    reference = Branches()
    for step in range(3):
        # Each rank goes its own way; in step 2 nobody goes left.
        left = [step != 2 and rank == 0 for rank in range(2)]
        net(x + rank, left[rank]).square().mean().backward()
        for other in range(2):
            (reference(x + other, left[other]).square().mean() / 2).backward()
        for (name, got), want in zip(net.module.named_parameters(), reference.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), name
            if got.grad is not None and want.grad is not None:
                close(got.grad, want.grad, name)


def test_unused_parameters(two: World) -> None:
    """Gradients of two branches, used by one rank, both or none, against the mean of both ranks' losses alone."""
    two.run(unused)


def no_sync() -> None:
    rank, net, reference = dist.get_rank(), DistributedDataParallel(Net()), Net()
    optimizer, plain = sgd(net.parameters()), sgd(reference.parameters())
    for step in range(2):
        for micro in range(3):
            x, y = batch(10 * step + micro)
            with net.no_sync() if micro < 2 else nullcontext():
                F.cross_entropy(net(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
            F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    same(state(net), state(reference))


def test_no_sync(two: World) -> None:
    """Gradients accumulated over 3 micro batches, reduced once: parameters against one process's."""
    two.run(no_sync)


class Recomputed(Net):
    """Its blocks are run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def recomputed() -> None:
    net = DistributedDataParallel(Recomputed(), static_graph=True)
    train(net, sgd(net.parameters()), dist.get_rank(), 2)
    same(state(net), alone())


def test_activation_checkpointing(two: World) -> None:
    """Blocks recomputed in backward, static graph: parameters against one process's."""
    two.run(recomputed)


class Normed(nn.Module):
    """Has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def buffers() -> None:
    rank, net, reference = dist.get_rank(), DistributedDataParallel(Normed()), Normed()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 8, 6, generator=generator) for _ in range(3)]
    for x in inputs:
        net(x[rank]).sum().backward()
        reference(x[0])
    # Buffers are rank 0's at the begin of each forward pass: one more spreads those of the last.
    net.eval()
    net(inputs[0][0])
    dist.broadcast(net.module.norm.running_mean, 0)
    torch.testing.assert_close(net.module.norm.running_mean, reference.norm.running_mean)
    if rank == 0:
        torch.testing.assert_close(net.module.norm.running_var, reference.norm.running_var)


def test_buffers(two: World) -> None:
    """Batch-norm statistics are rank 0's: against a process that saw rank 0's inputs."""
    two.run(buffers)


HOOKS = ["allreduce", "bf16", "fp16", "powersgd", "localsgd", "noop"]


def hooked(name: str) -> None:
    net = DistributedDataParallel(Net(), gradient_as_bucket_view=name == "powersgd")
    before = None
    match name:
        case "allreduce":
            net.register_comm_hook(None, default_hooks.allreduce_hook)
        case "fp16":
            net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            net.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "powersgd":
            # A rank as high as the matrices' makes the approximation exact.
            state_ = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.01
            )
            net.register_comm_hook(state_, powerSGD_hook.powerSGD_hook)
        case "localsgd":
            halves = dist.new_subgroups(dist.get_world_size())[0]
            local = post_localSGD_hook.PostLocalSGDState(None, halves, start_localSGD_iter=100)
            net.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        case "noop":
            net.register_comm_hook(None, debugging_hooks.noop_hook)

            def before() -> None:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    train(net, sgd(net.parameters()), dist.get_rank(), 2, steps=4, before_step=before)
    tolerance = {"bf16": 1e-2, "fp16": 2e-3, "powersgd": 1e-3}.get(name, 1e-5)
    same(state(net), alone(steps=4), tolerance)


@pytest.mark.parametrize("name", HOOKS)
def test_hook(two: World, name: str) -> None:
    """Parameters after 4 steps against one process's: exact, to 16 bits, or with a low-rank approximation whose rank is
    as high as the gradients'."""
    two.run(hooked, name)


def uneven() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, reference = DistributedDataParallel(Net()), Net()
    optimizer, plain = sgd(net.parameters()), sgd(reference.parameters())
    counts = [4, 2, 5, 3]
    with Join([net]):
        for step in range(counts[rank]):
            x, y = batch(step)
            F.cross_entropy(net(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(max(counts)):
        x, y = batch(step)
        for other in range(ranks):
            if step < counts[other]:
                (F.cross_entropy(reference(x.chunk(ranks)[other]), y.chunk(ranks)[other]) / ranks).backward()
        plain.step()
        plain.zero_grad()
    same(state(net), state(reference))


def test_join_with_uneven_inputs(four: World) -> None:
    """4, 2, 5 and 3 batches: parameters against one process that adds up the losses of the ranks still there."""
    four.run(uneven)


def zero(parameters_as_bucket_view: bool) -> None:
    net, reference = DistributedDataParallel(Net()), Net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(),
        optimizer_class=torch.optim.Adam,
        parameters_as_bucket_view=parameters_as_bucket_view,
        lr=0.01,
    )
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    train(net, optimizer, dist.get_rank(), dist.get_world_size())
    train(reference, plain)
    same(state(net), state(reference), 1e-4)
    # Every rank has a part of the state only; rank 1 gathers it all.
    assert 0 < len(optimizer.optim.state) < len(plain.state)
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        gathered, want = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert gathered.keys() == want.keys()
        for index in want:
            torch.testing.assert_close(gathered[index]["exp_avg"], want[index]["exp_avg"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("view", [False, True])
def test_zero(four: World, view: bool) -> None:
    """ZeRO's parameters and its gathered Adam state against plain Adam in one process."""
    four.run(zero, view)


def zero_overlapped() -> None:
    net, reference = DistributedDataParallel(Net(), bucket_cap_mb=0.001, gradient_as_bucket_view=True), Net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
    )
    net.register_comm_hook(
        None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, net, optimizer, shard_buckets=True)
    )
    # The first two steps only learn the buckets; the update is the hook's, so optimizer.step() does nothing.
    train(net, optimizer, dist.get_rank(), 2, steps=5)
    plain = sgd(reference.parameters())
    train(reference, plain, steps=3, start=2)
    same(state(net), state(reference))


def test_zero_overlapped_with_ddp(two: World) -> None:
    """The optimizer's step inside DDP's hook, which waits for collectives there: parameters against plain SGD."""
    two.run(zero_overlapped)
