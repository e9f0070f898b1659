"""Fully sharded training, FSDP1, FSDP2 and HSDP: the parameters after some steps against one process's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

from tests.harness import BACKEND
from tests.parallel.model import Block, Net, alone, batch, same, sgd, state, train
from tests.parallel.world import World


def sharded(net: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """FSDP2 over blocks and the whole."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    if BACKEND == "gloo":
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return net


def grid(*shape: int) -> DeviceMesh:
    """A mesh; two dimensions are HSDP's."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def fsdp2(shape: tuple[int, ...], options: dict[str, Any], clip: float | None, tolerance: float) -> None:
    net = sharded(Net(), grid(*shape), **options)
    seen: list[Tensor] = []

    def before() -> None:
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
            seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    train(net, sgd(net.parameters()), dist.get_rank(), dist.get_world_size(), before_step=before)
    same(state(net), alone(clip=clip), tolerance)
    if clip is not None:
        assert all(norm > clip for norm in seen), "nothing was clipped: choose a lower limit"


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.parametrize(
    ("shape", "options", "clip", "tolerance"),
    [
        ((4,), {}, 0.3, 1e-5),
        ((4,), {"reshard_after_forward": False}, None, 1e-5),
        ((4,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None, 1e-5),
        ((4,), BF16, None, 0.01),
        ((4,), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}, None, 0.01),
        ((2, 2), {}, 0.3, 1e-5),
        ((2, 2), BF16, None, 0.01),
    ],
    ids=["clip", "keep", "offload", "bf16", "bf16 reduced", "hsdp clip", "hsdp bf16"],
)
def test_fsdp2(
    four: World, shape: tuple[int, ...], options: dict[str, Any], clip: float | None, tolerance: float
) -> None:
    """Uneven shards, quarters of each batch: parameters after 3 steps, gradients clipped or in bfloat16."""
    four.run(fsdp2, shape, options, clip, tolerance)


def meta(shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        net = Net()
    sharded(net, grid(*shape))
    net.to_empty(device="cpu")
    source = dict(Net().named_parameters())
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.device.type == "cpu"
        shard = torch.distributed.tensor.distribute_tensor(
            source[name].detach(), parameter.device_mesh, parameter.placements
        )
        with torch.no_grad():
            parameter.copy_(shard)
    optimizer = sgd(net.parameters())
    train(net, optimizer, dist.get_rank(), 4)
    same(state(net), alone())
    # Whole states on rank 0, as checkpoints take them.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(net, options=options)
    momenta: Any = get_optimizer_state_dict(net, optimizer, options=options)
    if dist.get_rank() == 0:
        whole: Any = model_state
        same(whole, alone())
        plain = Net()
        reference = sgd(plain.parameters())
        train(plain, reference)
        for name, parameter in plain.named_parameters():
            got = momenta["state"][name]["momentum_buffer"]
            torch.testing.assert_close(got, reference.state[parameter]["momentum_buffer"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_meta_device(four: World, shape: tuple[int, ...]) -> None:
    """Made on the meta device, sharded, then filled: parameters, and whole model and optimizer states on rank 0."""
    four.run(meta, shape)


def accumulated() -> None:
    net, reference = sharded(Net(), grid(4)), Net()
    rank, optimizer, plain = dist.get_rank(), sgd(net.parameters()), sgd(reference.parameters())
    assert isinstance(net, FSDPModule)
    for step in range(2):
        for micro in range(3):
            x, y = batch(10 * step + micro)
            net.set_requires_gradient_sync(micro == 2)
            net.set_is_last_backward(micro == 2)
            F.cross_entropy(net(x.chunk(4)[rank]), y.chunk(4)[rank]).backward()
            F.cross_entropy(reference(x), y).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    same(state(net), state(reference))


def test_fsdp2_accumulates(four: World) -> None:
    """Gradients of 3 micro batches kept whole, reduced with the last: parameters against one process's."""
    four.run(accumulated)


def divided() -> None:
    net = sharded(Net(), grid(4))
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(4.0)
    train(net, sgd(net.parameters()), dist.get_rank(), 4)
    same(state(net), alone())


def test_fsdp2_divide_factor(four: World) -> None:
    """TorchTitan's way, PREMUL_SUM: with a factor of the rank count, parameters against one process's."""
    four.run(divided)


def by_column() -> None:
    net = sharded(
        Net(), grid(2), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None
    )
    assert any(p.placements == (Shard(1),) for p in net.parameters() if isinstance(p, DTensor))
    train(net, sgd(net.parameters()), dist.get_rank(), 2)
    same(state(net), alone())


def test_fsdp2_by_column(two: World) -> None:
    """Weights sharded along their second dimension: parameters against one process's."""
    two.run(by_column)


def compiled() -> None:
    net = sharded(Net(), grid(2))
    for block in net.blocks:
        block.compile(fullgraph=True)  # one graph serves both
    train(net, sgd(net.parameters()), dist.get_rank(), 2)
    same(state(net), alone())


def test_fsdp2_compiled(two: World) -> None:
    """torch.compile of the blocks under FSDP2: parameters against one process's, not compiled."""
    two.run(compiled, timeout=150)


FSDP1: dict[str, dict[str, Any]] = {
    "full": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "grad op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "none": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "not orig": {"use_orig_params": False},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "limited": {"limit_all_gathers": True, "forward_prefetch": True},
}


def fsdp1(name: str, clip: float | None) -> None:
    options = {"use_orig_params": True, **FSDP1[name]}
    if name == "hybrid":
        options["device_mesh"] = grid(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD and FSDP1 itself are deprecated
        net = FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options
        )
        before = (lambda: net.clip_grad_norm_(clip)) if clip is not None else None
        optimizer = sgd(net.parameters())
        train(net, optimizer, dist.get_rank(), dist.get_world_size(), before_step=before)
        with FullyShardedDataParallel.state_dict_type(
            net, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        ):
            whole = net.state_dict()
    if dist.get_rank() == 0:
        same(whole, alone(clip=clip), 0.01 if name == "bf16" else 1e-5)


@pytest.mark.parametrize("name", FSDP1)
def test_fsdp1(four: World, name: str) -> None:
    """FSDP1 in every sharding strategy: the whole state gathered on rank 0 against one process's parameters."""
    four.run(fsdp1, name, 0.3 if name in ("full", "hybrid", "not orig") else None)


def fsdp1_meta() -> None:
    source = dict(Net().named_parameters())

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for name, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                parameter.copy_(source[names[id(module)] + name])

    with torch.device("meta"):
        net = Net()
    names = {id(module): f"{name}." if name else "" for name, module in net.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            param_init_fn=fill,
            use_orig_params=True,
        )
        rank, reference = dist.get_rank(), Net()
        optimizer, plain = sgd(wrapped.parameters()), sgd(reference.parameters())
        for micro in range(3):
            x, y = batch(micro)
            loss = lambda net, x=x, y=y, n=1, r=0: F.cross_entropy(net(x.chunk(n)[r]), y.chunk(n)[r])  # noqa: E731
            if micro < 2:
                with wrapped.no_sync():
                    loss(wrapped, n=2, r=rank).backward()
            else:
                loss(wrapped, n=2, r=rank).backward()
            loss(reference).backward()
        optimizer.step()
        plain.step()
        with FullyShardedDataParallel.summon_full_params(wrapped):
            same(state(wrapped), state(reference))


def test_fsdp1_meta_device_and_no_sync(two: World) -> None:
    """Made on the meta device, 3 micro batches accumulated: summoned parameters against one process's."""
    two.run(fsdp1_meta)
