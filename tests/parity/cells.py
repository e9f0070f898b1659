"""One cell of the parity table: an operation, a dtype, a reduction and a layout, played on every rank and judged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.differential.data import MOVED, any_bytes, generator, numbers, place
from tests.differential.reference import Expected, has, reduced

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "send and recv",
    "recv from any",
)
UNEVEN = ("reduce_scatter", "all_gather", "all_to_all", "all_to_all_single", "gather")
"""Operations whose blocks may differ in size."""
LAYOUTS = (
    "plain",
    "strided",
    "negated view",
    "expanded input",
    "expanded output",
    "empty",
    "0-dim",
    "uneven blocks",
)
SHAPES = {"empty": (0, 3), "0-dim": ()}


@dataclass(frozen=True)
class Cell:
    """What is tried."""

    op: str
    dtype: torch.dtype = torch.float32
    reduction: str = ""
    layout: str = "plain"


def play(cell: Cell, seconds: float) -> str:
    """On each rank: "ok", "wrong", or the error's class and words. In a group of its own, which it may break."""
    try:
        return "ok" if _Try(cell, dist.new_group(timeout=timedelta(seconds=seconds))).right() else "wrong"
    except Exception as error:
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().split("\n")[0])
        return f"{type(error).__name__}: {text}"


class _Try:
    def __init__(self, cell: Cell, group: Any) -> None:
        self.cell, self.group = cell, group
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.random = Random(5)
        self.judged: list[tuple[Tensor, Expected]] = []

    def right(self) -> bool:
        getattr(self, self.cell.op.replace(" ", "_"))()
        return all(expected.wrong(got) == 0 for got, expected in self.judged)

    def values(self, source: int, block: int = 0) -> Tensor:
        cell = self.cell
        shape: tuple[int, ...] = SHAPES.get(cell.layout, (4, 6))
        if cell.layout == "uneven blocks":
            shape = (4 + block, 6)
        rng = generator(3, source, block)
        if cell.reduction and cell.dtype not in MOVED:
            values = numbers(rng, shape, cell.dtype, "factors" if cell.reduction == "PRODUCT" else "exact", 0)
        else:
            values = any_bytes(rng, shape, cell.dtype)
        return values[:1].expand(shape).contiguous() if cell.layout == "expanded input" else values

    def data(self) -> list[Tensor]:
        return [self.values(source) for source in range(self.ranks)]

    def laid(self, values: Tensor, output: bool) -> Tensor:
        layout = {"strided": "strided", "expanded input": "expanded", "negated view": "neg"}.get(
            self.cell.layout, "plain"
        )
        return place(values, layout, self.random, output).tensor

    def into(self, want: Tensor | Expected, start: Tensor | None = None) -> Tensor:
        expected = want if isinstance(want, Expected) else Expected(want)
        shape = expected.values.shape
        if self.cell.layout == "expanded output":
            tensor = torch.zeros(1, dtype=self.cell.dtype).expand(shape)
        else:
            tensor = self.laid(torch.zeros_like(expected.values) if start is None else start, output=True)
        self.judged.append((tensor, expected))
        return tensor

    def of(self, values: Tensor) -> Tensor:
        return self.laid(values, output=False)

    def result(self, tensors: list[Tensor]) -> Expected:
        if not has(self.cell.dtype, self.cell.reduction):
            return Expected(tensors[0])  # to be refused
        return reduced(self.cell.reduction, tensors, 0.25 if self.cell.reduction == "PREMUL_SUM" else 1.0)

    def op(self) -> Any:
        if self.cell.reduction == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(0.25)
        return getattr(dist.ReduceOp, self.cell.reduction)

    def all_reduce(self) -> None:
        data = self.data()
        dist.all_reduce(self.into(self.result(data), data[self.rank]), self.op(), group=self.group)

    def reduce(self) -> None:
        data = self.data()
        mine = self.into(self.result(data), data[0]) if self.rank == 0 else self.of(data[self.rank])
        dist.reduce(mine, 0, self.op(), group=self.group)

    def reduce_scatter(self) -> None:
        want = self.result([self.values(source, self.rank) for source in range(self.ranks)])
        dist.reduce_scatter(
            self.into(want),
            [self.of(self.values(self.rank, b)) for b in range(self.ranks)],
            self.op(),
            group=self.group,
        )

    def reduce_scatter_tensor(self) -> None:
        want = self.result([self.values(source, self.rank) for source in range(self.ranks)])
        mine = self.whole([self.values(self.rank, block) for block in range(self.ranks)])
        dist.reduce_scatter_tensor(self.into(want), self.of(mine), self.op(), group=self.group)

    def whole(self, blocks: list[Tensor]) -> Tensor:
        return torch.cat([block.reshape(1) if block.dim() == 0 else block for block in blocks])

    def broadcast(self) -> None:
        data = self.values(1)
        dist.broadcast(self.into(data, data if self.rank == 1 else None), 1, group=self.group)

    def all_gather(self) -> None:
        data = [self.values(source, source) for source in range(self.ranks)]
        dist.all_gather([self.into(tensor) for tensor in data], self.of(data[self.rank]), group=self.group)

    def all_gather_into_tensor(self) -> None:
        data = self.data()
        dist.all_gather_into_tensor(self.into(self.whole(data)), self.of(data[self.rank]), group=self.group)

    def all_to_all(self) -> None:
        outputs = [self.into(self.values(source, self.rank)) for source in range(self.ranks)]
        dist.all_to_all(
            outputs, [self.of(self.values(self.rank, block)) for block in range(self.ranks)], group=self.group
        )

    def all_to_all_single(self) -> None:
        wants = [self.values(source, self.rank) for source in range(self.ranks)]
        mine = [self.values(self.rank, block) for block in range(self.ranks)]
        splits: dict[str, Any] = {}
        if self.cell.layout == "uneven blocks":
            splits = {
                "output_split_sizes": [len(want) for want in wants],
                "input_split_sizes": [len(tensor) for tensor in mine],
            }
        dist.all_to_all_single(self.into(self.whole(wants)), self.of(self.whole(mine)), group=self.group, **splits)

    def gather(self) -> None:
        data = [self.values(source, source) for source in range(self.ranks)]
        outputs = [self.into(tensor) for tensor in data] if self.rank == 0 else None
        dist.gather(self.of(data[self.rank]), outputs, 0, group=self.group)

    def scatter(self) -> None:
        data = [self.values(source, source) for source in range(self.ranks)]
        output = self.into(data[self.rank])
        dist.scatter(output, [self.of(tensor) for tensor in data] if self.rank == 0 else None, 0, group=self.group)

    def send_and_recv(self) -> None:
        left, right = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        work = dist.isend(self.of(self.values(self.rank)), right, group=self.group)
        dist.recv(self.into(self.values(left)), left, group=self.group)
        assert work is not None
        work.wait()

    def recv_from_any(self) -> None:
        if self.rank == 0:
            for _ in range(self.ranks - 1):
                output = self.into(self.values(1))
                source = dist.recv(output, group=self.group)
                self.judged[-1] = (output, Expected(self.values(source)))
        else:
            dist.send(self.of(self.values(self.rank)), 0, group=self.group)
