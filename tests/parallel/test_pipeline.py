"""Pipelines: losses, outputs and gradients of each stage against the whole network in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    SplitPoint,
    pipeline,
)

from tests.parallel.model import CLASSES, WIDTH, Block, batch, close, full
from tests.parallel.world import World

MICRO = 8


def layers(count: int) -> list[nn.Module]:
    """The stages of a network, the same on every rank."""
    torch.manual_seed(7)
    return [Block() for _ in range(count - 1)] + [nn.Sequential(Block(), nn.Linear(WIDTH, CLASSES))]


def reference(count: int, x: Tensor, y: Tensor) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Stages with gradients, the output and the loss: the mean over equal micro batches is the batch's."""
    stages = layers(count)
    output = nn.Sequential(*stages)(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    return stages, output.detach(), loss.detach()


def compare(mine: nn.Module, want: nn.Module) -> None:
    for (name, got), plain in zip(mine.named_parameters(), want.parameters(), strict=True):
        assert got.grad is not None and plain.grad is not None, name
        close(full(got.grad), plain.grad, name)


KINDS: dict[str, tuple[Any, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "breadth first": (ScheduleLoopedBFS, 2),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2),
}


def scheduled(name: str) -> None:
    kind, each = KINDS[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = each * ranks
    x, y = batch(0, size=2 * MICRO)
    mine = layers(count)
    want, want_output, want_loss = reference(count, x, y)
    indices = range(rank, count, ranks)
    stages = [PipelineStage(mine[index], index, count, torch.device("cpu")) for index in indices]
    schedule = kind(stages if each > 1 else stages[0], n_microbatches=MICRO, loss_fn=F.cross_entropy)
    losses: list[Tensor] = []
    args = (x,) if rank == 0 else ()
    last: dict[str, Any] = {"target": y, "losses": losses} if rank == ranks - 1 else {}
    output = schedule.step(*args, **last)
    for index in indices:
        compare(mine[index], want[index])
    if rank == ranks - 1:
        torch.testing.assert_close(torch.stack(losses).mean().detach(), want_loss)
        torch.testing.assert_close(output.detach(), want_output)


@pytest.mark.parametrize("name", KINDS)
def test_schedule(four: World, name: str) -> None:
    """8 micro batches over 4 ranks, one or two stages on each: gradients, losses and outputs."""
    four.run(scheduled, name)


def ends(stage: int, x: Tensor, y: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """What the first of two stages, and the last, give to step()."""
    return ((x,), {}) if stage == 0 else ((), {"target": y})


def traced() -> None:
    x, y = batch(0, size=2 * MICRO)
    whole = nn.Sequential(*layers(2))
    want, _, _ = reference(2, x, y)
    cut = pipeline(whole, mb_args=(x.chunk(MICRO)[0],), split_spec={"1": SplitPoint.BEGINNING})
    rank = dist.get_rank()
    stage = cut.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=F.cross_entropy)
    for _ in range(2):
        stage.submod.zero_grad()
        args, last = ends(rank, x, y)
        schedule.step(*args, **last)
    compare(cut.get_stage_module(rank), want[rank])


def test_traced(two: World) -> None:
    """A network that pipeline() cut in two by tracing, two steps of 1F1B: gradients of each half."""
    two.run(traced)


def with_fsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    x, y = batch(0, size=4 * MICRO)
    mine = layers(2)[pp]
    want, _, _ = reference(2, x, y)
    fully_shard(mine, mesh=mesh["dp"])
    stage = PipelineStage(mine, pp, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=F.cross_entropy)
    args, last = ends(pp, x.chunk(2)[dp], y.chunk(2)[dp])
    schedule.step(*args, **last)
    compare(mine, want[pp])


def test_times_fsdp2(four: World) -> None:
    """Two stages of 1F1B, each sharded by FSDP2 over two ranks: gradients."""
    four.run(with_fsdp)
