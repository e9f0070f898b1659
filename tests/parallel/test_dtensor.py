"""DTensor, tensor and sequence parallelism: local shards, whole tensors and gradients against one process's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.parallel.model import Block, Net, alone, batch, close, full, same, sgd, state, train
from tests.parallel.world import World


def shards(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a tensor, cut by torch.chunk along each mesh dimension in turn."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = local.chunk(mesh.size(axis), placement.dim)
            at = coordinate[axis]
            local = chunks[at] if at < len(chunks) else local.narrow(placement.dim, 0, 0)
    return local


def begin(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor of that value. A partial one is made of unequal parts that add up to it."""
    local = shards(whole, mesh, placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            size, at = mesh.size(axis), coordinate[axis]
            # The first has more, the others take it away again: all exact.
            local = local + float(size - 1) if at == 0 else local - local - 1.0
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def redistributed(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    each: list[Placement] = [Replicate(), Partial(), *(Shard(dim) for dim in range(len(shape)))]
    pairs = 0
    for source in itertools.product(each, repeat=len(mesh_shape)):
        for target in itertools.product(each, repeat=len(mesh_shape)):
            # torch refuses to make a whole tensor partial, and in two dimensions passes by there from shards.
            made = [
                s for s, t in zip(source, target, strict=True) if isinstance(t, Partial) and not isinstance(s, Partial)
            ]
            if made and (len(mesh_shape) > 1 or isinstance(made[0], Replicate)):
                continue
            got = begin(whole, mesh, source).redistribute(mesh, target)
            case = f"{source} to {target}"
            assert got.placements == target, case
            assert torch.equal(got.full_tensor(), whole), case
            if not any(isinstance(placement, Partial) for placement in target):
                assert torch.equal(got.to_local(), shards(whole, mesh, target)), case
            pairs += 1
    return pairs


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [((4,), (8, 12)), ((4,), (7, 5)), ((4,), (3, 9, 2)), ((2, 2), (5, 3))],
    ids=str,
)
def test_redistribute(four: World, mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Every placement to every other, even and uneven shards, more ranks than rows: each rank's shard against
    torch.chunk, and the whole."""
    kinds = 2 + len(shape)
    pairs = kinds**2 - 1 if len(mesh) == 1 else (kinds * (kinds - 1) + 1) ** 2
    assert four.run(redistributed, mesh, shape) == [pairs] * 4


def backwards() -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(42.0).reshape(7, 6)
    weight = (torch.arange(42.0).reshape(7, 6) % 5) - 2
    for source, target in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        leaf: Any = distribute_tensor(whole, mesh, [source]).requires_grad_()
        (leaf.redistribute(mesh, [target]) * distribute_tensor(weight, mesh, [target])).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(full(leaf.grad), weight), f"{source} to {target}"


def test_gradient_of_redistribute(four: World) -> None:
    """Gradients through every redistribution against the weights of the sum."""
    four.run(backwards)


def operations() -> None:
    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(10, 6, generator=generator), torch.randn(6, 11, generator=generator)
    each = (Replicate(), Shard(0), Shard(1))
    for one, other in itertools.product(each, repeat=2):
        a, b = distribute_tensor(left, mesh, [one]), distribute_tensor(right, mesh, [other])
        product = a @ b
        torch.testing.assert_close(full(product), left @ right)
        torch.testing.assert_close(full(product.softmax(-1)), (left @ right).softmax(-1))
        torch.testing.assert_close(full(product.mean(0)), (left @ right).mean(0))
        torch.testing.assert_close(full(product.amax(1)), (left @ right).amax(1))
        torch.testing.assert_close(full(F.layer_norm(product, (11,))), F.layer_norm(left @ right, (11,)))


def test_operations(four: World) -> None:
    """Products, softmax, norms and reductions of sharded matrices against the same of whole ones."""
    four.run(operations)


def tensor_parallel() -> None:
    net = Net()
    mesh = init_device_mesh("cpu", (4,))
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    train(net, sgd(net.parameters()))
    same(state(net), alone())


def test_tensor_parallel(four: World) -> None:
    """Columns, then rows, uneven over 4 ranks: parameters after 3 steps against one process's."""
    four.run(tensor_parallel)


def sequence_parallel() -> None:
    mesh = init_device_mesh("cpu", (4,))
    net, reference = Net(width=24), Net(width=24)
    for block in net.blocks:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        parallelize_module(
            block,
            mesh,
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False),
        )
    optimizer, plain = sgd(net.parameters()), sgd(reference.parameters())
    rank = dist.get_rank()
    for step in range(3):
        x, y = batch(step, size=16, width=24)
        x, y = x.reshape(2, 8, 24), y.reshape(2, 8)
        hidden: Any = x.chunk(4, 1)[rank].contiguous()
        for block in net.blocks:
            hidden = block(hidden)
        logits = net.head(hidden.redistribute(mesh, [Replicate()]).to_local())
        F.cross_entropy(logits.reshape(16, -1), y.reshape(-1)).backward()
        F.cross_entropy(reference(x).reshape(16, -1), y.reshape(-1)).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    for (name, got), want in zip(net.named_parameters(), reference.parameters(), strict=True):
        close(full(got.detach()), want.detach(), name)


def test_sequence_parallel(four: World) -> None:
    """Norms on quarters of the sequence, gathered and scattered around the linear layers: parameters after 3 steps
    against one process's."""
    four.run(sequence_parallel)


def vocabulary() -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(6)
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10)
    torch.manual_seed(6)
    plain_embedding, plain_head = nn.Embedding(10, 8), nn.Linear(8, 10)
    tokens = torch.arange(12) * 7 % 10
    sharded = nn.Sequential(embedding, head)
    parallelize_module(
        sharded,
        mesh,
        {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(use_local_output=False)},
    )
    with loss_parallel():
        loss = F.cross_entropy(sharded(tokens), tokens.roll(1))
        loss.backward()
    want = F.cross_entropy(plain_head(plain_embedding(tokens)), tokens.roll(1))
    want.backward()
    torch.testing.assert_close(full(loss.detach()), want.detach())
    for got, plain in zip(sharded.parameters(), [*plain_embedding.parameters(), *plain_head.parameters()], strict=True):
        assert got.grad is not None and plain.grad is not None
        torch.testing.assert_close(full(got.grad), plain.grad, atol=1e-6, rtol=1e-5)


def test_vocabulary_parallel(four: World) -> None:
    """Embedding, head and loss sharded over the vocabulary, unevenly: loss and gradients against one process's."""
    four.run(vocabulary)


def whole_input(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
    return DTensor.from_local(inputs[0], mesh, [Replicate()])


def two_dimensional() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    for block in net.blocks:
        # Clipping wants all parameters on both dimensions of the mesh.
        assert isinstance(block, Block)
        distribute_module(block.norm, mesh["tp"], input_fn=whole_input, output_fn=lambda _, out, __: out.to_local())
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    parallelize_module(net, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(net, mesh=mesh["dp"])
    seen = []

    def clip() -> None:
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        seen.append(full(norm).item())

    train(net, sgd(net.parameters()), mesh["dp"].get_local_rank(), 2, before_step=clip)
    same(state(net), alone(clip=0.3))
    assert min(seen) > 0.3


def test_fsdp2_times_tensor_parallel(four: World) -> None:
    """FSDP2 × tensor parallel, gradients clipped over both: parameters after 3 steps against one process's."""
    four.run(two_dimensional)
