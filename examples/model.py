"""A small byte-level transformer in plain torch, and its plan for a 2-D mesh: FSDP2 over "dp", tensor and sequence
parallel over "tp"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `heads` must divide by the tensor-parallel degree, `length` too."""

    vocab: int = 256
    width: int = 128
    layers: int = 3
    heads: int = 4
    length: int = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions; [batch, length, width] in and out.

    The number of heads follows from what the projections give: under tensor parallelism that is this rank's share.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def rotation(length: int, head: int) -> Tensor:
    """Rotary angles [2, length, head / 2]: cosines, sines (Su et al. 2021, eq. 34)."""
    frequency = 10_000.0 ** (-torch.arange(0, head, 2).float() / head)
    angle = torch.outer(torch.arange(length).float(), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + head / 2]) of [batch, heads, length, head] by their position's angles."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class FeedForward(nn.Module):
    """Two projections around a GELU, four times as wide within."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_norm = nn.RMSNorm(shape.width)
        self.feed = FeedForward(shape)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed(self.feed_norm(x))


class Transformer(nn.Module):
    """Bytes [batch, length] to logits [batch, length, vocab]. Parameters depend on `seed` alone."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(shape.vocab, shape.width)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)
            nn.init.normal_(self.embed.weight, std=0.02)
        self.register_buffer("rotation", rotation(shape.length, shape.width // shape.heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Lays the model out over a mesh with dimensions "dp" and "tp". Between projections the sequence is sharded."""
    tp, dp = mesh["tp"], mesh["dp"]
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "feed_norm": SequenceParallel(),
                "feed.up": ColwiseParallel(input_layouts=Shard(1)),
                "feed.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def sum_gradients(model: nn.Module) -> None:
    """For gloo, which has neither AVG nor PREMUL_SUM in reduce-scatter: FSDP2 then divides by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
