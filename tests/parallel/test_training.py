"""Data, fully sharded and tensor parallel training give the numbers of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.harness import BACKEND, run

BATCH, WIDTH, STEPS = 12, 30, 5
"""Sizes that no rank count divides evenly by accident: 30 features on 4 ranks shard as 8, 8, 8, 6."""


class Network(nn.Module):
    """Two hidden layers, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.second(F.gelu(self.first(x)))))


def losses(network: nn.Module, part: int = 0, parts: int = 1, clip: float | None = None) -> list[float]:
    """Trains on the part-th of `parts` of one batch; gives the loss over the whole batch at each step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randint(0, 4, (BATCH,), generator=generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    seen = []
    for _ in range(STEPS):
        loss = F.cross_entropy(network(x.chunk(parts)[part]), y.chunk(parts)[part])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(whole)
        seen.append(whole.item() / parts)
    return seen


def alone(clip: float | None = None) -> list[float]:
    """The same in one process."""
    (want,) = run(lambda: losses(Network(), clip=clip), 1, init=False)
    return want


def hold(body: Callable[[], list[float]], ranks: int, want: list[float], tolerance: float = 1e-4) -> None:
    """The losses of every rank are those wanted, and fall."""
    for got in run(body, ranks, timeout=90):
        assert got == pytest.approx(want, abs=tolerance)
        assert got[-1] < got[0]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp(ranks: int, options: dict[str, Any]) -> None:
    def body() -> list[float]:
        return losses(DistributedDataParallel(Network(), **options), dist.get_rank(), ranks)

    hold(body, ranks, alone())


def test_ddp_fp16_hook() -> None:
    def body() -> list[float]:
        network = DistributedDataParallel(Network())
        network.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return losses(network, dist.get_rank(), 2)

    hold(body, 2, alone(), tolerance=1e-2)


def test_ddp_powersgd_hook() -> None:
    """The hook starts collectives inside its futures' callbacks."""

    def body() -> list[float]:
        network = DistributedDataParallel(Network())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        network.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return losses(network, dist.get_rank(), 2)

    # A low-rank approximation of the gradients: near, not equal.
    hold(body, 2, alone(), tolerance=0.1)


def sharded(network: Network, **options: Any) -> Network:
    """FSDP2 over the layers."""
    for layer in (network.first, network.second):
        fully_shard(layer, **options)
    fully_shard(network, **options)
    if BACKEND == "gloo":
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return network


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2(ranks: int) -> None:
    def body() -> list[float]:
        mesh = init_device_mesh("cpu", (ranks,))
        return losses(sharded(Network(), mesh=mesh), dist.get_rank(), ranks, clip=0.5)

    hold(body, ranks, alone(clip=0.5))


def test_fsdp2_bfloat16() -> None:
    def body() -> list[float]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return losses(sharded(Network(), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy), dist.get_rank(), 2)

    hold(body, 2, alone(), tolerance=0.05)


def test_fsdp2_divide_factor() -> None:
    """TorchTitan's way: a factor of its own makes FSDP2 ask for PREMUL_SUM; a factor of the rank count is the mean."""

    def body() -> list[float]:
        network = sharded(Network(), mesh=init_device_mesh("cpu", (2,)))
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
        return losses(network, dist.get_rank(), 2)

    hold(body, 2, alone())


def test_hsdp() -> None:
    def body() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return losses(sharded(Network(), mesh=mesh), dist.get_rank(), 4)

    hold(body, 4, alone())


def test_tensor_parallel() -> None:
    def body() -> list[float]:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        return losses(parallelize_module(Network(), init_device_mesh("cpu", (2,)), plan))

    hold(body, 2, alone())


def test_ddp_join_with_uneven_inputs() -> None:
    """Rank 1 has fewer batches; join() plays its part until the others are done."""

    def body() -> float:
        network = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        nn.init.constant_(network.module.weight, 1.0)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        with network.join():
            for _ in range(5 if dist.get_rank() == 0 else 3):
                network(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return network.module.weight.item()

    first, second = run(body, 2)
    # The joined rank's gradient is zero and the sum is divided by both ranks: 3 whole steps, 2 half ones.
    assert first == pytest.approx(1 - 3 * 0.1 - 2 * 0.05)
    assert second == pytest.approx(first)


def test_object_collectives() -> None:
    def body() -> bool:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = {"rank": rank, "text": "x" * 1000 * rank}
        everyone = [{"rank": r, "text": "x" * 1000 * r} for r in range(ranks)]
        gathered: list[object] = [None] * ranks
        dist.all_gather_object(gathered, mine)
        sent = [mine if rank == 1 else None]
        dist.broadcast_object_list(sent, src=1)
        got: list[object] = [None]
        dist.scatter_object_list(got, everyone if rank == 0 else None, src=0)
        return gathered == everyone and sent == [everyone[1]] and got == [mine]

    assert run(body, 3) == [True] * 3
