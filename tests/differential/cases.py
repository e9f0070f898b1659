"""Cases: drawn from a seed and a number, the same on every rank, and played on one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.differential.data import (
    DTYPES,
    EXPONENTS,
    LAYOUTS,
    NEGATABLE,
    REDUCED,
    Placed,
    any_bytes,
    generator,
    negative,
    numbers,
    part,
    place,
    raw,
)
from tests.differential.reference import REDUCTIONS, Expected, has, reduced

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One operation of one group. `shape` is that of a block; `uneven[i]` is how many rows block i has more."""

    seed: int
    number: int
    op: str
    group: int
    dtype: torch.dtype
    shape: Shape
    layouts: tuple[str, ...]
    is_async: bool
    root: int
    reduction: str
    factor: float
    tensor_factor: bool
    mode: str
    exponent: int
    uneven: tuple[tuple[int, ...], ...]
    in_place: bool
    many: int
    tag: int

    def __str__(self) -> str:
        about = f"{self.op} of {self.dtype} {list(self.shape)} in group {self.group}"
        if self.reduction:
            about += f", {self.reduction}, {self.mode} values"
        if self.reduction == "PREMUL_SUM":
            about += f", factor {'tensor ' if self.tensor_factor else ''}{self.factor}"
        return f"{about}, root {self.root}, layouts {self.layouts}, {'async' if self.is_async else 'sync'}"


REDUCING = ("all_reduce", "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced_all_reduce")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "ring",
    "any_source",
    "batch_isend_irecv",
    "coalesced_all_gather",
    "barrier",
)
AS_REAL = (
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "scatter",
    "ring",
    "any_source",
    "batch_isend_irecv",
    "coalesced_all_reduce",
    "coalesced_all_gather",
)
"""What torch's Python hands over as real numbers when it is complex: it refuses lazily conjugated tensors itself, and
makes a copy of a lazily negated output."""
OPS = (*REDUCING, *MOVING, "coalesced_reduce_scatter", "refused")


def draw(seed: int, number: int, sizes: Sequence[int]) -> Case:
    """Case `number` of a seed, for groups of these sizes."""
    random = Random(f"{seed}:{number}")
    op = random.choice(OPS)
    group = random.randrange(len(sizes))
    ranks = sizes[group]
    reducing = "reduce" in op
    reduction = random.choice(REDUCTIONS) if reducing or op == "refused" else ""
    able = [dtype for dtype in DTYPES if has(dtype, reduction) != (op == "refused")]
    dtype = random.choice(able if reduction and able else REDUCED)
    if op == "refused" and not able:
        op, reduction, dtype = "refused", "AVG", torch.bool
    if op == "coalesced_all_reduce" and dtype.is_complex and reduction == "PRODUCT":
        op = "all_reduce"  # torch's function refuses it, the group doesn't
    shape = _shape(random)
    mode = "exact"
    if dtype.is_floating_point or dtype.is_complex:
        if reduction == "PRODUCT":
            mode = random.choice(("factors", "rounding"))
        elif reduction in ("MIN", "MAX"):
            mode = "special"
        elif reduction:
            mode = random.choice(("exact", "exact", "special" if reduction == "SUM" else "exact", "rounding"))
    real = part(dtype)
    exponent = random.choice(EXPONENTS[real]) if real in EXPONENTS else 0
    factor = 1.0
    if reduction == "PREMUL_SUM":
        factor = random.choice((0.5, 0.25, -2.0, 1.0, 2.0**-7))
        if mode == "rounding":
            factor = random.choice((0.3, -1.7))
        elif exponent == EXPONENTS.get(real, (0,))[0]:
            # Halves of the smallest numbers would have to be rounded in f32 and f64 themselves.
            factor = random.choice((1.0, -2.0, 4.0))
    uneven = tuple(tuple(random.choice((0, 0, 1, 3)) for _ in range(ranks)) for _ in range(ranks))
    return Case(
        seed=seed,
        number=number,
        op=op,
        group=group,
        dtype=dtype,
        shape=shape,
        layouts=tuple(random.choice(LAYOUTS) for _ in range(2)),
        is_async=random.random() < 0.5,
        root=random.randrange(ranks),
        reduction=reduction,
        factor=factor,
        tensor_factor=random.random() < 0.5,
        mode=mode,
        exponent=exponent,
        uneven=uneven,
        in_place=random.random() < 0.3,
        many=random.randrange(1, 5),
        tag=random.randrange(3),
    )


def _shape(random: Random) -> Shape:
    """Mostly small; some with nothing in them, some of no dimensions, a few beyond the sizes at which plans change."""
    match random.choices(("scalar", "empty", "small", "middle", "large"), (1, 1, 8, 5, 0.7))[0]:
        case "scalar":
            return ()
        case "empty":
            return random.choice(((0,), (0, 3), (4, 0), (2, 0, 3)))
        case "small":
            return tuple(random.randint(1, 6) for _ in range(random.randint(1, 3)))
        case "middle":
            return random.choice(((random.randint(50, 4000),), (random.randint(2, 60), random.randint(2, 60))))
        case _:
            return (random.randint(100, 300), random.randint(50, 300))


@dataclass
class Group:
    """A group as one of its members has it."""

    handle: Any
    rank: int
    ranks: int


@dataclass
class Played:
    """A case under way on this rank."""

    case: Case
    group: Group
    works: list[Any] = field(default_factory=list)
    outputs: list[tuple[Placed, Expected]] = field(default_factory=list)
    inputs: list[Placed] = field(default_factory=list)
    same_everywhere: bool = False
    """All members hold the same bits."""
    complaints: list[str] = field(default_factory=list)

    def finish(self) -> tuple[list[str], str]:
        """What is wrong, and the digest of the results' bits."""
        for work in self.works:
            if work is not None:
                work.wait()
        digest = hashlib.blake2b(digest_size=8)
        for index, (placed, expected) in enumerate(self.outputs):
            wrong = expected.wrong(placed.tensor)
            if wrong:
                got, want = placed.tensor.reshape(-1), expected.values.reshape(-1)
                self.complaints.append(
                    f"output {index}: {wrong} of {want.numel()} wrong: {got[:6]}, expected {want[:6]}"
                )
            if not placed.around_untouched():
                self.complaints.append(f"output {index}: memory around it was written")
            digest.update(raw(placed.tensor).numpy().tobytes())
        for index, placed in enumerate(self.inputs):
            if not placed.untouched():
                self.complaints.append(f"input {index} was written")
        return self.complaints, digest.hexdigest()


class Player:
    """Plays one case: `random` differs between ranks and draws what may differ, such as strides."""

    def __init__(self, case: Case, group: Group) -> None:
        self.case, self.group = case, group
        self.me, self.ranks = group.rank, group.ranks
        self.random = Random(f"{case.seed}:{case.number}:{group.rank}")
        self.played = Played(case, group)
        lazy = case.dtype.is_complex and case.op in AS_REAL
        self.layouts = ["strided" if lazy and layout in ("conj", "neg") else layout for layout in case.layouts]
        self.kwargs: dict[str, Any] = {"group": group.handle, "async_op": case.is_async}

    def values(self, source: int, block: int = 0, shape: Shape | None = None) -> Tensor:
        """Rank `source`'s block."""
        case = self.case
        rng = generator(case.seed, case.number, source, block)
        shape = case.shape if shape is None else shape
        repeat = self.layouts[0] == "expanded" and len(shape) > 0 and shape[0] > 1
        drawn = (1, *shape[1:]) if repeat else shape
        if case.reduction:
            values = numbers(rng, drawn, case.dtype, case.mode, case.exponent)
        elif case.dtype in NEGATABLE and {"neg", "conj"} & set(self.layouts):
            # torch's own negation of a narrow NaN gives one or another NaN.
            values = numbers(rng, drawn, case.dtype, "rounding", 0)
        else:
            values = any_bytes(rng, drawn, case.dtype)
        return values.expand(shape).contiguous() if repeat else values

    def input(self, values: Tensor) -> Tensor:
        """A tensor that must not change."""
        placed = place(values, self.layouts[0], self.random)
        self.played.inputs.append(placed)
        return placed.tensor

    def output(self, want: Tensor | Expected, start: Tensor | None = None) -> Tensor:
        """A tensor that must become `want`; `start` is what it holds at first."""
        expected = want if isinstance(want, Expected) else Expected(want)
        first = torch.zeros_like(expected.values) if start is None else start
        placed = place(first, self.layouts[1], self.random, output=True)
        self.played.outputs.append((placed, expected))
        return placed.tensor

    def result(self, tensors: list[Tensor]) -> Expected:
        """The reduction of one tensor per rank."""
        case = self.case
        return reduced(case.reduction, tensors, case.factor, rounding=case.mode == "rounding")

    def reduction(self) -> Any:
        """As torch names it."""
        case = self.case
        if case.reduction != "PREMUL_SUM":
            return getattr(dist.ReduceOp, case.reduction)
        return dist._make_nccl_premul_sum(
            torch.tensor(case.factor, dtype=torch.float64) if case.tensor_factor else case.factor
        )

    def add(self, work: Any) -> None:
        """An operation under way."""
        self.played.works.append(work)

    def play(self) -> Played:
        """Starts the case."""
        getattr(self, self.case.op)()
        return self.played

    # One method per operation.

    def all_reduce(self) -> None:
        data = [self.values(rank) for rank in range(self.ranks)]
        self.played.same_everywhere = True
        tensor = self.output(self.result(data), data[self.me])
        if self.case.dtype.is_complex:
            self.group_all_reduce(tensor)
        else:
            self.add(dist.all_reduce(tensor, self.reduction(), **self.kwargs))

    def group_all_reduce(self, tensor: Tensor) -> None:
        """By the group's own method: torch's function lets complex numbers have SUM and AVG only."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = self.reduction(), self.case.is_async
        self.add(self.group.handle.allreduce([tensor], options))

    def reduce(self) -> None:
        data = [self.values(rank) for rank in range(self.ranks)]
        root = self.case.root
        mine = self.output(self.result(data), data[self.me]) if root == self.me else self.input(data[self.me])
        self.add(dist.reduce(mine, group_dst=root, op=self.reduction(), **self.kwargs))

    def rows(self, block: int, row: int = 0) -> Shape:
        """The shape of a block that may be uneven."""
        shape = self.case.shape
        return (shape[0] + self.case.uneven[row][block], *shape[1:]) if shape else shape

    def reduce_scatter(self) -> None:
        shapes = [self.rows(block) for block in range(self.ranks)]
        want = self.result([self.values(rank, self.me, shapes[self.me]) for rank in range(self.ranks)])
        inputs = [self.input(self.values(self.me, block, shapes[block])) for block in range(self.ranks)]
        self.add(dist.reduce_scatter(self.output(want), inputs, self.reduction(), **self.kwargs))

    def whole(self, blocks: list[Tensor]) -> Tensor:
        """Blocks one after another; of scalars, a vector."""
        return torch.cat([block.reshape(1) if block.dim() == 0 else block for block in blocks])

    def reduce_scatter_tensor(self) -> None:
        everyone = [[self.values(rank, block) for block in range(self.ranks)] for rank in range(self.ranks)]
        want = self.result([blocks[self.me] for blocks in everyone])
        mine = self.whole(everyone[self.me])
        self.add(dist.reduce_scatter_tensor(self.output(want), self.input(mine), self.reduction(), **self.kwargs))

    def broadcast(self) -> None:
        data = self.values(self.case.root)
        start = data if self.me == self.case.root else None
        self.played.same_everywhere = True
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = self.case.root, self.case.is_async
        self.add(self.group.handle.broadcast([self.output(data, start)], options))

    def all_gather(self) -> None:
        data = [self.values(rank, 0, self.rows(rank)) for rank in range(self.ranks)]
        outputs = [self.output(tensor) for tensor in data]
        self.played.same_everywhere = True
        self.add(dist.all_gather(outputs, self.input(data[self.me]), **self.kwargs))

    def all_gather_into_tensor(self) -> None:
        data = [self.values(rank) for rank in range(self.ranks)]
        self.played.same_everywhere = True
        whole = self.output(self.whole(data))
        mine = self.input(data[self.me])
        if self.case.in_place and data[0].dim():
            # As FSDP does it: the input is this rank's part of the output.
            rows = data[0].shape[0]
            mine = whole[self.me * rows : (self.me + 1) * rows]
            if mine.is_neg():
                torch._neg_view(mine).copy_(negative(data[self.me]))
            else:
                mine.copy_(data[self.me])
        self.add(dist.all_gather_into_tensor(whole, mine, **self.kwargs))

    def pair(self, source: int, target: int) -> Tensor:
        """What `source` has for `target`, of any number of rows."""
        return self.values(source, target, self.rows(target, source))

    def all_to_all(self) -> None:
        outputs = [self.output(self.pair(source, self.me)) for source in range(self.ranks)]
        inputs = [self.input(self.pair(self.me, target)) for target in range(self.ranks)]
        self.add(dist.all_to_all(outputs, inputs, **self.kwargs))

    def all_to_all_single(self) -> None:
        wants = [self.pair(source, self.me) for source in range(self.ranks)]
        mine = [self.pair(self.me, target) for target in range(self.ranks)]
        splits: tuple[Any, ...] = ()
        if self.case.shape and not self.case.in_place:
            splits = ([len(want) for want in wants], [len(tensor) for tensor in mine])
        else:
            wants = [self.values(source, self.me) for source in range(self.ranks)]
            mine = [self.values(self.me, target) for target in range(self.ranks)]
        output, given = self.output(self.whole(wants)), self.input(self.whole(mine))
        self.add(dist.all_to_all_single(output, given, *splits, **self.kwargs))

    def gather(self) -> None:
        data = [self.values(rank, 0, self.rows(rank)) for rank in range(self.ranks)]
        root = self.case.root
        outputs = [self.output(tensor) for tensor in data] if root == self.me else None
        self.add(dist.gather(self.input(data[self.me]), outputs, group_dst=root, **self.kwargs))

    def scatter(self) -> None:
        data = [self.values(rank, 0, self.rows(rank)) for rank in range(self.ranks)]
        root = self.case.root
        inputs = [self.input(tensor) for tensor in data] if root == self.me else None
        self.add(dist.scatter(self.output(data[self.me]), inputs, group_src=root, **self.kwargs))

    def ring(self) -> None:
        """Everybody sends `many` messages to the right with tags, and takes those from the left in another order."""
        case, group = self.case, self.group.handle
        right, left = (self.me + 1) % self.ranks, (self.me - 1) % self.ranks
        for tag in range(case.many):
            self.add(dist.isend(self.input(self.values(self.me, tag)), group_dst=right, group=group, tag=tag))
        tags = list(range(case.many))
        self.random.shuffle(tags)
        for tag in tags:
            output = self.output(self.values(left, tag))
            if case.is_async:
                self.add(dist.irecv(output, group_src=left, group=group, tag=tag))
            else:
                dist.recv(output, group_src=left, group=group, tag=tag)

    def any_source(self) -> None:
        """All send to the root, which takes them as they come and knows from whom."""
        case, group = self.case, self.group.handle
        root = case.root
        if self.me != root:
            self.add(dist.isend(self.input(self.values(self.me)), group_dst=root, group=group, tag=100 + case.number))
            return
        seen = []
        for _ in range(self.ranks - 1):
            placed = place(torch.zeros(case.shape, dtype=case.dtype), self.layouts[1], self.random, output=True)
            source = dist.recv(placed.tensor, group=group, tag=100 + case.number)
            seen.append(dist.get_group_rank(group, source))
            self.played.outputs.append((placed, Expected(self.values(seen[-1]))))
        if sorted(seen) != [rank for rank in range(self.ranks) if rank != root]:
            self.played.complaints.append(f"messages from ranks {seen}")

    def batch_isend_irecv(self) -> None:
        """Every pair exchanges something, in one batch."""
        ops = []
        for peer in range(self.ranks):
            if peer != self.me:
                for kind, tensor in (
                    (dist.isend, self.input(self.pair(self.me, peer))),
                    (dist.irecv, self.output(self.pair(peer, self.me))),
                ):
                    ops.append(dist.P2POp(kind, tensor, group=self.group.handle, group_peer=peer))
        self.random.shuffle(ops)
        for work in dist.batch_isend_irecv(ops) if ops else []:
            self.add(work)

    def barrier(self) -> None:
        self.add(dist.barrier(**self.kwargs))

    def coalesced(self, start: Callable[[int], Any]) -> None:
        """`many` operations in one launch."""
        device = torch.device("cpu")
        with dist._coalescing_manager(self.group.handle, device, async_ops=self.case.is_async) as works:
            for index in range(self.case.many):
                start(index)
        if self.case.is_async:
            self.add(works)

    def coalesced_all_reduce(self) -> None:
        self.played.same_everywhere = True

        def start(index: int) -> None:
            data = [self.values(rank, index) for rank in range(self.ranks)]
            dist.all_reduce(self.output(self.result(data), data[self.me]), self.reduction(), group=self.group.handle)

        self.coalesced(start)

    def coalesced_all_gather(self) -> None:
        self.played.same_everywhere = True

        def start(index: int) -> None:
            data = [self.values(rank, index) for rank in range(self.ranks)]
            output, mine = self.output(self.whole(data)), self.input(data[self.me])
            dist.all_gather_into_tensor(output, mine, group=self.group.handle)

        self.coalesced(start)

    def coalesced_reduce_scatter(self) -> None:
        def start(index: int) -> None:
            first = index * self.ranks
            want = self.result([self.values(rank, first + self.me) for rank in range(self.ranks)])
            mine = self.whole([self.values(self.me, first + block) for block in range(self.ranks)])
            dist.reduce_scatter_tensor(self.output(want), self.input(mine), self.reduction(), group=self.group.handle)

        self.coalesced(start)

    def refused(self) -> None:
        """A reduction that the dtype hasn't: a named error at once, and the group goes on."""
        case = self.case
        values = any_bytes(generator(case.number), case.shape, case.dtype)
        tensor = self.output(values, values)
        try:
            self.group_all_reduce(tensor)
        except ValueError as error:
            name = str(case.dtype).removeprefix("torch.")
            if case.reduction not in str(error) or name not in str(error):
                self.played.complaints.append(f"the refusal does not name dtype and reduction: {error}")
        else:
            self.played.complaints.append("not refused")
