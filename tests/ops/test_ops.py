"""Every operation, dtype, size and layout against a plain reference, over each road that bytes can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run

Op: Any = dist.ReduceOp
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SHAPES = ((), (0,), (1,), (17,), (3, 5), (0, 4), (251, 401))
"""Zero dimensions, none, one, odd, two dimensions, and large enough to be read straight from the peer's memory."""
LAYOUTS = ("plain", "transposed", "sliced")

ROADS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "staged": {"env": {"PODRING_CMA": "0"}},
    "two hosts": {"rank_env": lambda rank: {"PODRING_HOST_ID": f"host{rank % 2}"}},
    "uneven hosts": {"rank_env": lambda rank: {"PODRING_HOST_ID": "alone" if rank == 0 else "together"}},
}
"""How bytes travel: process_vm_readv, through shared memory, over TCP between hosts played on this one."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Rank `rank`'s data: small integers, so that sums and products of 8 ranks are exact in every dtype."""
    count = int(torch.Size(shape).numel())
    small = (torch.arange(count) * 7 + rank * 3 + salt * 5) % 3
    if dtype is torch.bool:
        return (small == 1).reshape(shape)
    if dtype.is_floating_point:
        small = small - 1 + (small == 1).long() * 3  # -1, 3, 1: signs, and no zeros
    return small.reshape(shape).to(dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "transposed" and tensor.dim() == 2:
        return tensor.t().contiguous().t()
    if layout == "sliced" and tensor.dim() > 0:
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor.clone()


def reduced(op: Any, tensors: list[Tensor]) -> Tensor:
    """What a reduction gives, computed in a wide type and rounded once at the end."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        stack = torch.stack(tensors)
        return stack.any(0) if op in (Op.SUM, Op.MAX) else stack.all(0)
    wide = torch.stack(tensors).to(torch.float64 if dtype.is_floating_point else torch.int64)
    match op:
        case Op.SUM:
            result = wide.sum(0)
        case Op.AVG:
            result = wide.sum(0) / len(tensors) if dtype.is_floating_point else wide.sum(0) // len(tensors)
        case Op.PRODUCT:
            result = wide.prod(0)
        case Op.MIN:
            result = wide.amin(0)
        case Op.MAX:
            result = wide.amax(0)
        case _:
            raise ValueError(op)
    return result.to(dtype)


class Cases:
    """Goes through dtypes, shapes, layouts, sync and async; collects what is wrong instead of stopping at the first."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = DTYPES, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        self.dtypes, self.shapes = dtypes, shapes
        self.wrong: list[str] = []
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.label = ""
        self.count = 0
        self.use_async = False

    def each(self) -> Iterator[tuple[torch.dtype, tuple[int, ...], str]]:
        """All combinations; every other one is asynchronous."""
        for dtype in self.dtypes:
            for shape in self.shapes:
                for layout in LAYOUTS:
                    self.count += 1
                    self.use_async = self.count % 2 == 0
                    self.label = f"{dtype} {shape} {layout} {'async' if self.use_async else 'sync'}"
                    yield dtype, shape, layout

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Calls a collective, synchronously or not."""
        work = function(*args, async_op=self.use_async, **kwargs)
        if self.use_async and work is not None:
            work.wait()

    def expect(self, got: Tensor, want: Tensor, exact: bool = True) -> None:
        """Notes a difference: of bits, or, if not `exact`, of more than the dtype's rounding."""
        if got.dtype != want.dtype or got.shape != want.shape:
            self.wrong.append(f"{self.label}: {got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}")
        elif not (torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-2, atol=1e-2)):
            at = (got != want).nonzero()
            self.wrong.append(f"{self.label}: {len(at)} of {got.numel()} wrong, first at {at[0].tolist()}")

    def data(self, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> list[Tensor]:
        """All ranks' data."""
        return [values(rank, shape, dtype, salt) for rank in range(self.ranks)]


def all_reduce() -> list[str]:
    cases = Cases()
    for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.AVG):
        for dtype, shape, layout in cases.each():
            if op == Op.AVG and dtype is torch.bool:
                continue
            cases.label += f" {op}"
            data = cases.data(shape, dtype)
            mine = laid_out(data[cases.rank], layout)
            cases.call(dist.all_reduce, mine, op)
            cases.expect(mine, reduced(op, data), exact=op != Op.AVG)
    return cases.wrong


def premul_sum() -> list[str]:
    """Each rank's values times a factor: a power of two, so exact."""
    cases = Cases(FLOATS)
    for dtype, shape, layout in cases.each():
        data = cases.data(shape, dtype)
        mine = laid_out(data[cases.rank], layout)
        cases.call(dist.all_reduce, mine, dist._make_nccl_premul_sum(0.25))
        cases.expect(mine, reduced(Op.SUM, [tensor * 0.25 for tensor in data]))
        part = torch.empty(shape, dtype=dtype)
        whole = torch.stack(cases.data((cases.ranks, *shape), dtype)[cases.rank].unbind())
        cases.call(dist.reduce_scatter_tensor, part, whole, dist._make_nccl_premul_sum(0.5))
        everyone = [tensor[cases.rank] * 0.5 for tensor in cases.data((cases.ranks, *shape), dtype)]
        cases.expect(part, reduced(Op.SUM, everyone))
    return cases.wrong


def broadcast_and_reduce() -> list[str]:
    cases = Cases()
    for number, (dtype, shape, layout) in enumerate(cases.each()):
        root = number % cases.ranks
        data = cases.data(shape, dtype)
        mine = laid_out(data[cases.rank], layout)
        cases.call(dist.broadcast, mine, root)
        cases.expect(mine, data[root])
        mine = laid_out(data[cases.rank], layout)
        cases.call(dist.reduce, mine, root)
        if cases.rank == root:
            cases.expect(mine, reduced(Op.SUM, data))
    return cases.wrong


def all_gather() -> list[str]:
    """The list form, with equal and with uneven sizes, and the single form."""
    cases = Cases()
    for dtype, shape, layout in cases.each():
        data = cases.data(shape, dtype)
        mine = laid_out(data[cases.rank], layout)
        outputs = [laid_out(torch.zeros(shape, dtype=dtype), layout) for _ in data]
        cases.call(dist.all_gather, outputs, mine)
        for got, want in zip(outputs, data, strict=True):
            cases.expect(got, want)
        cases.expect(mine, data[cases.rank])
        if shape:
            whole = laid_out(torch.zeros((cases.ranks * shape[0], *shape[1:]), dtype=dtype), layout)
            cases.call(dist.all_gather_into_tensor, whole, mine)
            cases.expect(whole, torch.cat(data))
            uneven = [values(rank, (shape[0] + rank, *shape[1:]), dtype) for rank in range(cases.ranks)]
            outputs = [torch.zeros_like(tensor) for tensor in uneven]
            cases.call(dist.all_gather, outputs, laid_out(uneven[cases.rank], layout))
            for got, want in zip(outputs, uneven, strict=True):
                cases.expect(got, want)
    return cases.wrong


def reduce_scatter() -> list[str]:
    cases = Cases()
    for number, (dtype, shape, layout) in enumerate(cases.each()):
        op = (Op.SUM, Op.MAX)[number % 2]
        # everyone[rank][block]: what a rank brings for the rank `block`.
        everyone = [[values(rank, shape, dtype, block) for block in range(cases.ranks)] for rank in range(cases.ranks)]
        want = reduced(op, [blocks[cases.rank] for blocks in everyone])
        got = laid_out(torch.zeros(shape, dtype=dtype), layout)
        cases.call(dist.reduce_scatter, got, [laid_out(block, layout) for block in everyone[cases.rank]], op)
        cases.expect(got, want)
        if shape:
            got = laid_out(torch.zeros(shape, dtype=dtype), layout)
            cases.call(dist.reduce_scatter_tensor, got, laid_out(torch.cat(everyone[cases.rank]), layout), op)
            cases.expect(got, want)
    return cases.wrong


def all_to_all() -> list[str]:
    """The list form, with any size per pair, and the single form, even and uneven."""
    cases = Cases()
    for dtype, shape, layout in cases.each():
        ranks, rank = cases.ranks, cases.rank

        def block(source: int, target: int, uneven: bool, shape: Any = shape, dtype: Any = dtype) -> Tensor:
            size = (max(0, shape[0] + target - source), *shape[1:]) if uneven and shape else shape
            return values(source, size, dtype, target)

        for uneven in (False, True):
            ins = [block(rank, target, uneven) for target in range(ranks)]
            want = [block(source, rank, uneven) for source in range(ranks)]
            outs = [laid_out(torch.zeros_like(tensor), layout) for tensor in want]
            cases.call(dist.all_to_all, outs, [laid_out(tensor, layout) for tensor in ins])
            for got, expected in zip(outs, want, strict=True):
                cases.expect(got, expected)
            if shape:
                got = torch.zeros_like(torch.cat(want))
                splits = ([len(tensor) for tensor in want], [len(tensor) for tensor in ins]) if uneven else ()
                cases.call(dist.all_to_all_single, got, torch.cat(ins), *splits)
                cases.expect(got, torch.cat(want))
    return cases.wrong


def gather_and_scatter() -> list[str]:
    cases = Cases()
    for number, (dtype, shape, layout) in enumerate(cases.each()):
        root = number % cases.ranks
        data = cases.data(shape, dtype)
        outs = [laid_out(torch.zeros(shape, dtype=dtype), layout) for _ in data] if cases.rank == root else None
        cases.call(dist.gather, laid_out(data[cases.rank], layout), outs, root)
        for got, want in zip(outs or [], data, strict=outs is not None):
            cases.expect(got, want)
        mine = laid_out(torch.zeros(shape, dtype=dtype), layout)
        cases.call(dist.scatter, mine, [laid_out(tensor, layout) for tensor in data] if outs else None, root)
        cases.expect(mine, data[cases.rank])
    return cases.wrong


def send_and_recv() -> list[str]:
    """Around the ring, everybody sending first, with tags that arrive in the other order."""
    cases = Cases()
    for dtype, shape, layout in cases.each():
        right, left = (cases.rank + 1) % cases.ranks, (cases.rank - 1) % cases.ranks
        sends = [
            dist.isend(laid_out(values(cases.rank, shape, dtype, tag), layout), right, tag=tag) for tag in range(3)
        ]
        for tag in (2, 0, 1):
            got = laid_out(torch.zeros(shape, dtype=dtype), layout)
            dist.recv(got, left, tag=tag)
            cases.expect(got, values(left, shape, dtype, tag))
        for work in sends:
            assert work is not None
            work.wait()
    return cases.wrong


def coalesced() -> list[str]:
    """Several tensors in one launch."""
    cases = Cases()
    device = torch.device("cpu")
    shapes = ((3,), (250, 40), (0,), (1,))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        cases.label = f"{dtype} coalesced"
        data = [cases.data(shape, dtype) for shape in shapes]
        mine = [everyone[cases.rank].clone() for everyone in data]
        with dist._coalescing_manager(device=device):
            for tensor in mine:
                dist.all_reduce(tensor)
        for got, everyone in zip(mine, data, strict=True):
            cases.expect(got, reduced(Op.SUM, everyone))
        wholes = [torch.zeros((cases.ranks * shape[0], *shape[1:]), dtype=dtype) for shape in shapes]
        with dist._coalescing_manager(device=device):
            for whole, everyone in zip(wholes, data, strict=True):
                dist.all_gather_into_tensor(whole, everyone[cases.rank])
        for got, everyone in zip(wholes, data, strict=True):
            cases.expect(got, torch.cat(everyone))
        parts = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        brought = [[values(cases.rank, shape, dtype, block) for block in range(cases.ranks)] for shape in shapes]
        with dist._coalescing_manager(device=device):
            for part, blocks in zip(parts, brought, strict=True):
                dist.reduce_scatter_tensor(part, torch.cat(blocks))
        for got, shape in zip(parts, shapes, strict=True):
            cases.expect(got, reduced(Op.SUM, [values(rank, shape, dtype, cases.rank) for rank in range(cases.ranks)]))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, data[1][cases.rank].clone(), (cases.rank + 1) % cases.ranks),
                dist.P2POp(dist.irecv, got := torch.zeros(shapes[1], dtype=dtype), (cases.rank - 1) % cases.ranks),
            ]
        )
        for work in works:
            work.wait()
        cases.expect(got, data[1][(cases.rank - 1) % cases.ranks])
    return cases.wrong


def large() -> list[str]:
    """Four MiB and more, where algorithms change; not a multiple of anything."""
    cases = Cases((torch.float32, torch.bfloat16), ((1_048_583,), (1031, 1033)))
    for dtype, shape, layout in cases.each():
        data = cases.data(shape, dtype)
        mine = laid_out(data[cases.rank], layout)
        cases.call(dist.all_reduce, mine)
        cases.expect(mine, reduced(Op.SUM, data))
        whole = torch.zeros((cases.ranks * shape[0], *shape[1:]), dtype=dtype)
        cases.call(dist.all_gather_into_tensor, whole, laid_out(data[cases.rank], layout))
        cases.expect(whole, torch.cat(data))
        part = torch.zeros(shape, dtype=dtype)
        cases.call(dist.reduce_scatter_tensor, part, whole)
        cases.expect(part, data[cases.rank] * cases.ranks)
        mine = laid_out(data[cases.rank], layout)
        cases.call(dist.broadcast, mine, cases.ranks - 1)
        cases.expect(mine, data[-1])
    return cases.wrong


OPS = (
    all_reduce,
    premul_sum,
    broadcast_and_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    gather_and_scatter,
    send_and_recv,
    coalesced,
    large,
)


def hold(op: Callable[[], list[str]], ranks: int, road: str) -> None:
    """Runs one of the above and shows the first of what is wrong, rank by rank."""
    wrong = run(op, ranks, timeout=120, **ROADS[road])
    lines = [f"[rank {rank}] {line}" for rank, found in enumerate(wrong) for line in found]
    assert not lines, f"{len(lines)} wrong\n" + "\n".join(lines[:20])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_shared_memory(op: Callable[[], list[str]], ranks: int) -> None:
    hold(op, ranks, "shared memory")


@pytest.mark.parametrize("op", OPS)
def test_staged(op: Callable[[], list[str]]) -> None:
    hold(op, 3, "staged")


@pytest.mark.parametrize(("road", "ranks"), [("two hosts", 4), ("uneven hosts", 3)])
@pytest.mark.parametrize("op", OPS)
def test_played_hosts(op: Callable[[], list[str]], road: str, ranks: int) -> None:
    hold(op, ranks, road)


def test_same_bits_on_every_rank() -> None:
    """Sums that round: whatever order they were taken in, all ranks hold the same bits."""

    def body() -> list[bytes]:
        torch.manual_seed(dist.get_rank())
        results = []
        for count in (5, 4096, 300_001):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                tensor = torch.randn(count).to(dtype)
                dist.all_reduce(tensor)
                results.append(tensor.view(torch.uint8).numpy().tobytes())
        return results

    for road in ROADS.values():
        first, *others = run(body, 4, **road)
        assert all(other == first for other in others)


def test_min_and_max_propagate_nan() -> None:
    def body() -> list[bool]:
        found = []
        for op in (Op.MIN, Op.MAX):
            for dtype in FLOATS:
                tensor = torch.ones(300, dtype=dtype)
                if dist.get_rank() == 1:
                    tensor[17] = float("nan")
                dist.all_reduce(tensor, op)
                found.append(bool(tensor.isnan()[17]) and int(tensor.isnan().sum()) == 1)
        return found

    assert all(all(found) for found in run(body, 3))


def test_sums_of_half_floats_are_rounded_once() -> None:
    """16-bit floats accumulate in float32: 256 + 1 + 1 is 258 in bfloat16, while 256 + 1 alone rounds back to 256."""

    def body() -> float:
        tensor = torch.full((9,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        return tensor[4].item()

    assert run(body, 3) == [258.0] * 3


def test_order_of_point_to_point_is_free() -> None:
    """irecv before isend on both sides, large ones, beside a collective under way."""

    def body() -> bool:
        peer = 1 - dist.get_rank()
        got = torch.zeros(1 << 20)
        receive = dist.irecv(got, peer)
        reduce = dist.all_reduce(total := torch.ones(1 << 18), async_op=True)
        send = dist.isend(torch.full((1 << 20,), float(dist.get_rank())), peer)
        for work in (send, receive, reduce):
            assert work is not None
            work.wait()
        return bool((got == peer).all() and (total == 2).all())

    assert run(body, 2) == [True] * 2
