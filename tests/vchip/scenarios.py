"""What a rank on a virtual chip does in tests: named scenarios, run one after another in one job.

    podring run --slice v5e:2x2 --nproc-per-node 2 tests/vchip/scenarios.py NAME…

A scenario compares what device "tpu" gives with the same on CPU tensors, and raises if they differ. Every rank prints
one line per scenario, `SCENARIO {json}`, and the job goes on after a failure that all ranks share.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

warnings.filterwarnings("ignore", category=UserWarning)

SCENARIOS: dict[str, Callable[[], None]] = {}
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
TPU = torch.device("tpu", 0)
THEIRS = os.environ.get("PODRING_DISABLE", "0") not in ("", "0")
"""Whether "tpu" is torch_tpu's own process group."""
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def world() -> Any:
    """The default group."""
    return dist.group.WORLD


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    """Puts a function into the table."""
    SCENARIOS[function.__name__] = function
    return function


def same(got: Tensor, expected: Tensor) -> None:
    """Bit for bit, shape and dtype too."""
    assert got.device.type == "tpu", got.device
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def close(got: Sequence[float], expected: Sequence[float]) -> None:
    """Losses, within what another order of additions makes of them."""
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def values(dtype: torch.dtype, count: int, rank: int = RANK) -> Tensor:
    """Small whole numbers, other ones on every rank; exact in every dtype under every reduction of up to 4 ranks."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 3 + (1 if dtype is not torch.bool else -1)
    return numbers.to(dtype)


def on_both(act: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
    """Runs `act` on a CPU tensor and on a copy of it on the device, and compares."""
    expected = act(tensor.clone())
    same(act(tensor.to(TPU)), expected)


# Collectives.


@scenario
def reductions() -> None:
    for dtype in DTYPES:
        for name in REDUCTIONS:
            if dtype is torch.bool and name == "AVG":
                continue
            op = getattr(dist.ReduceOp, name)

            def all_reduce(tensor: Tensor, op: Any = op) -> Tensor:
                dist.all_reduce(tensor, op)
                return tensor

            def reduce(tensor: Tensor, op: Any = op) -> Tensor:
                dist.reduce(tensor, WORLD - 1, op)
                return tensor if RANK == WORLD - 1 else tensor * 0

            def reduce_scatter(tensor: Tensor, op: Any = op) -> Tensor:
                out = tensor.new_zeros(tensor.numel() // WORLD)
                dist.reduce_scatter_tensor(out, tensor, op)
                return out

            for act in (all_reduce, reduce, reduce_scatter):
                on_both(act, values(dtype, 12 * WORLD))
    for name in ("BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)

        def bitwise(tensor: Tensor, op: Any = op) -> Tensor:
            dist.all_reduce(tensor, op)
            return tensor

        on_both(bitwise, values(torch.int32, 33))


@scenario
def movements() -> None:
    peers = range(WORLD)
    for dtype in DTYPES:
        sent = values(dtype, 6 * WORLD)

        def all_gather(tensor: Tensor) -> Tensor:
            out = [torch.zeros_like(tensor) for _ in peers]
            dist.all_gather(out, tensor)
            return torch.stack(out)

        def all_gather_single(tensor: Tensor) -> Tensor:
            out = tensor.new_zeros(WORLD, *tensor.shape)
            dist.all_gather_into_tensor(out, tensor)
            return out

        def broadcast(tensor: Tensor) -> Tensor:
            dist.broadcast(tensor, 1)
            return tensor

        def gather(tensor: Tensor) -> Tensor:
            out = [torch.zeros_like(tensor) for _ in peers] if RANK == 0 else None
            dist.gather(tensor, out, 0)
            return torch.stack(out) if out is not None else tensor

        def scatter(tensor: Tensor) -> Tensor:
            out = torch.zeros_like(tensor)
            dist.scatter(out, [tensor + rank for rank in peers] if RANK == 1 else None, 1)
            return out

        def all_to_all(tensor: Tensor) -> Tensor:
            out = [tensor.new_zeros(6) for _ in peers]
            dist.all_to_all(out, list(tensor.chunk(WORLD)))
            return torch.cat(out)

        def all_to_all_single(tensor: Tensor) -> Tensor:
            out = torch.zeros_like(tensor)
            dist.all_to_all_single(out, tensor)
            return out

        def uneven(tensor: Tensor) -> Tensor:
            # Rank r sends r + 1 rows to everybody.
            tensor = tensor[: (RANK + 1) * WORLD]
            out = tensor.new_zeros(sum(rank + 1 for rank in peers))
            dist.all_to_all_single(out, tensor, [rank + 1 for rank in peers], [RANK + 1] * WORLD)
            return out

        acts = (all_gather, all_gather_single, broadcast, gather, all_to_all, all_to_all_single, uneven)
        for act in acts if dtype is torch.bool else (*acts, scatter):
            on_both(act, sent)


@scenario
def wide_and_narrow_types() -> None:
    # f64 and complex numbers are added; 8-bit floats are moved, as c10d has it.
    for dtype in (torch.float64, torch.complex64, torch.complex128):
        numbers = values(torch.float32, 12 * WORLD).to(dtype)

        def total(tensor: Tensor) -> Tensor:
            dist.all_reduce(tensor)
            return tensor

        def scattered(tensor: Tensor) -> Tensor:
            out = tensor.new_zeros(12)
            dist.reduce_scatter_tensor(out, tensor)
            return out

        on_both(total, numbers)
        on_both(scattered, numbers)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.complex64):
        mine = values(torch.float32, 16).to(dtype)
        out = torch.zeros(16 * WORLD, device=TPU).to(dtype)
        dist.all_gather_into_tensor(out, mine.to(TPU))
        expected = torch.cat([values(torch.float32, 16, rank) for rank in range(WORLD)])
        read = torch.complex64 if dtype.is_complex else torch.float32
        same(out.cpu().to(read).to(TPU), expected.to(read))


@scenario
def point_to_point() -> None:
    after, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    sent = values(torch.float32, 1000).to(TPU)
    # Large enough not to be sent before it is asked for; and all ranks receive before they send.
    large = torch.full((1 << 20,), float(RANK), device=TPU)
    got, got_large = torch.zeros(1000, device=TPU), torch.zeros(1 << 20, device=TPU)
    works = [dist.irecv(got, before, tag=7), dist.irecv(got_large, before)]
    works += [dist.isend(large, after), dist.isend(sent, after, tag=7)]
    for work in works:
        assert work is not None
        work.wait()
    same(got, values(torch.float32, 1000, before))
    same(got_large, torch.full((1 << 20,), float(before)))
    ops = [dist.P2POp(dist.isend, sent * 2, after), dist.P2POp(dist.irecv, got, before)]
    if THEIRS:
        # A send of torch_tpu's (0.2.0) waits until it is received.
        ops.reverse()
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, values(torch.float32, 1000, before) * 2)
    # A chain: each rank sends on what it has computed of what it was sent.
    if RANK > 0:
        dist.recv(got, RANK - 1)
    else:
        got.zero_()
    if RANK < WORLD - 1:
        dist.send(got + 1, RANK + 1)
    same(got, torch.full((1000,), float(RANK)))
    for tensor in (torch.tensor(RANK, device=TPU), torch.zeros(0, 3, dtype=torch.bfloat16, device=TPU)):
        other = torch.zeros_like(tensor)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, other, before), dist.P2POp(dist.isend, tensor, after)]
        ):
            work.wait()
        same(other, torch.full_like(tensor, before).cpu())


@scenario
def from_any_source() -> None:
    got = torch.zeros(1000, device=TPU)
    if RANK == 0:
        senders = set()
        for _ in range(WORLD - 1):
            sender = dist.recv(got)
            same(got, torch.full((1000,), float(sender)))
            senders.add(sender)
        assert senders == set(range(1, WORLD)), senders
    else:
        dist.send(torch.full((1000,), float(RANK), device=TPU), 0)


@scenario
def layouts() -> None:
    def view(base: Tensor) -> Tensor:
        dist.all_reduce(base[1])
        return base

    def column(base: Tensor) -> Tensor:
        dist.all_reduce(base[:, 1])
        return base

    def transposed(base: Tensor) -> Tensor:
        turned = base.t()
        dist.all_reduce(turned)
        return base

    def stepped(base: Tensor) -> Tensor:
        dist.all_reduce(base[::2, ::3])
        return base

    def expanded(base: Tensor) -> Tensor:
        out = base.new_zeros(WORLD, 4, 6)
        dist.all_gather_into_tensor(out, base[0].expand(4, 6))
        return out

    def empty(base: Tensor) -> Tensor:
        dist.all_reduce(base[:0])
        return base

    def scalar(base: Tensor) -> Tensor:
        one = base[1, 2].clone()
        dist.all_reduce(one)
        return one

    def flat_slices(base: Tensor) -> Tensor:
        # As FSDP2 has it: the output and the input are places within one flat tensor.
        flat = base.new_zeros(24 * WORLD)
        mine = flat[24 * RANK : 24 * (RANK + 1)]
        mine.copy_(base.flatten())
        dist.all_gather_into_tensor(flat, mine)
        return flat

    def channels_last(base: Tensor) -> Tensor:
        image = base.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        dist.all_reduce(image)
        return image.contiguous()

    def dense_part_of_channels_last(base: Tensor) -> Tensor:
        image = base.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        dist.all_reduce(image[0, :, 1, 2])
        return image.contiguous()

    def dense_part_of_columns(base: Tensor) -> Tensor:
        columns = torch.empty_strided((4, 6), (1, 4), device=base.device).copy_(base)
        dist.all_reduce(columns[:, 2])
        return columns.contiguous()

    def dense_part_of_transposed(base: Tensor) -> Tensor:
        turned = base.t()
        dist.all_reduce(turned[:, 1])
        out = base.new_zeros(WORLD, 6)
        dist.all_gather_into_tensor(out, turned[:, 2])
        return torch.cat((base.flatten(), out.flatten()))

    base = values(torch.float32, 24).reshape(4, 6)
    parts = (dense_part_of_channels_last, dense_part_of_columns, dense_part_of_transposed)
    for act in (*parts, view, column, transposed, stepped, expanded, empty, scalar, flat_slices, channels_last):
        on_both(act, base)


@scenario
def aliases_keep_their_values() -> None:
    # torch_tpu's clone, copy_, detach and views share one buffer until somebody writes: nobody may write under them.
    tensor = values(torch.float32, 64).to(TPU)
    before = values(torch.float32, 64)
    copied = torch.empty(64, device=TPU)
    copied.copy_(tensor)
    aliases = [tensor.clone(), copied, tensor.float().clone(), tensor.reshape(8, 8).clone().flatten()]
    shared = tensor.detach()
    dist.all_reduce(tensor)
    expected = values(torch.float32, 64)
    dist.all_reduce(expected)
    same(tensor, expected)
    same(shared, expected)
    for alias in aliases:
        same(alias, before)


@scenario
def deferred_values() -> None:
    # A value that is still being computed when the collective is called, and used at once after it.
    tensor = torch.ones(256, 256, device=TPU)
    for _ in range(4):
        tensor = tensor @ tensor / 256
    tensor = tensor * (RANK + 1)
    dist.all_reduce(tensor)
    total = sum(range(1, WORLD + 1))
    same(tensor * 2 + 1, torch.full((256, 256), 2.0 * total + 1))
    del tensor
    kept = torch.full((1 << 16,), float(RANK), device=TPU)
    work = dist.all_reduce(kept, async_op=True)
    again = kept
    del kept
    assert work is not None
    work.wait()
    same(again, torch.full((1 << 16,), float(sum(range(WORLD)))))


@scenario
def asynchronous() -> None:
    tensors = [torch.full((1000,), float(index + RANK), device=TPU) for index in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    total = sum(range(WORLD))
    for index, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        if index % 2:
            (result,) = work.get_future().wait()
            same(result, torch.full((1000,), float(index * WORLD + total)))
        work.wait()
        assert work.is_completed()
        same(tensor, torch.full((1000,), float(index * WORLD + total)))
    # Polled instead of waited for.
    tensor = torch.ones(1000, device=TPU)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    end = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < end
    same(tensor, torch.full((1000,), float(WORLD)))


@scenario
def coalesced() -> None:
    tensors = [values(torch.float32, count).to(TPU) for count in (3, 1000, 0, 77)]
    expected = [values(torch.float32, count) for count in (3, 1000, 0, 77)]
    with dist._coalescing_manager(device=TPU):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for one in expected:
        dist.all_reduce(one)
    for tensor, one in zip(tensors, expected, strict=True):
        same(tensor, one)


@scenario
def objects() -> None:
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK, "word": "x" * RANK})
    assert gathered == [{"rank": rank, "word": "x" * rank} for rank in range(WORLD)], gathered
    told: list[Any] = [("from", RANK), None]
    dist.broadcast_object_list(told, 0, device=TPU)
    assert told == [("from", 0), None], told
    dist.barrier()


@scenario
def monitored_barrier() -> None:
    dist.monitored_barrier()


def refused(kind: type[BaseException], words: str, act: Callable[[], object]) -> None:
    """Fails unless `act` raises such an error, with these words in it."""
    try:
        act()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"expected {words!r}")


@scenario
def refusals() -> None:
    tpu, cpu = torch.ones(4, device=TPU), torch.ones(4)
    mixed = "expected every tensor on "
    refused(ValueError, mixed, lambda: dist.reduce_scatter(tpu, [cpu] * WORLD))
    refused(ValueError, mixed, lambda: dist.all_gather([tpu] * (WORLD - 1) + [cpu], tpu))
    refused(ValueError, "elements", lambda: dist.all_gather_into_tensor(torch.ones(3, device=TPU), tpu))
    # A process has one chip, and torch_tpu makes no tensor of another.
    assert torch.empty(4, device="tpu:1").device == TPU
    dist.all_reduce(tpu)
    same(tpu, torch.full((4,), float(WORLD)))


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


COLLECTIVES = 10_000 if os.environ.get("PODRING_VCHIP_ALL") else 3_000


@scenario
def memory_stays_flat() -> None:
    tensor, gathered = torch.ones(1 << 14, device=TPU), torch.zeros(WORLD << 14, device=TPU)

    def loop(count: int) -> None:
        for _ in range(count):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            dist.all_gather_into_tensor(gathered, tensor)

    loop(500)
    before = resident()
    loop(COLLECTIVES // 2)
    grown = resident() - before
    assert grown < 16 << 20, f"{grown} bytes more after {COLLECTIVES} collectives"
    same(tensor, torch.ones(1 << 14))


@scenario
def speed() -> None:
    # The same tensor, in a CPU's memory and in a virtual chip's, by turns.
    on_cpu, on_chip = torch.ones(16 << 20), torch.ones(16 << 20, device=TPU)
    times: dict[str, list[float]] = {"cpu": [], "tpu": []}
    for _ in range(15):
        for name, tensor in (("cpu", on_cpu), ("tpu", on_chip)):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            times[name].append(time.perf_counter() - begin)
    cpu, tpu = (sorted(times[name][3:])[6] * 1e3 for name in ("cpu", "tpu"))
    if RANK == 0:
        print(f"SPEED all_reduce of 64 MiB: cpu {cpu:.1f} ms, tpu {tpu:.1f} ms, ratio {tpu / cpu:.2f}", flush=True)
    assert tpu <= 1.5 * cpu, (cpu, tpu)


# Functional collectives, eager and compiled.


def functional(tensor: Tensor) -> list[Tensor]:
    group = world()
    return [
        funcol.all_reduce(tensor, "sum", group),
        funcol.all_reduce(tensor, "avg", group),
        funcol.all_reduce(tensor, "max", group),
        funcol.all_gather_tensor(tensor, 0, group),
        funcol.reduce_scatter_tensor(tensor, "sum", 0, group),
        funcol.broadcast(tensor, 0, group),
        funcol.all_to_all_single(tensor, None, None, group),
    ]


@scenario
def functional_eager() -> None:
    tensor = values(torch.float32, 8 * WORLD * 3).reshape(8 * WORLD, 3)
    for got, expected in zip(functional(tensor.to(TPU)), functional(tensor), strict=True):
        same(funcol.wait_tensor(got), funcol.wait_tensor(expected))


@contextlib.contextmanager
def inside_of_programs(count: int, split: int = 0) -> Iterator[None]:
    """So many collectives stay inside of compiled programs, where podring is asked; and so many don't."""
    from podring import _core, _graphs
    from torch._dynamo.utils import counters

    def now() -> list[int]:
        seen = counters["podring"]
        return [seen[_graphs.INSIDE], _core.program_counts()["inside"], seen[_graphs.SPLIT]]

    before = now()
    yield
    made = [after - first for after, first in zip(now(), before, strict=True)]
    assert made == [count, count, split], made


@scenario
def compiled_collectives() -> None:
    tensor = values(torch.float32, 8 * WORLD * 3).reshape(8 * WORLD, 3)

    group = world()

    def between(tensor: Tensor) -> Tensor:
        summed = funcol.all_reduce(tensor * 2, "sum", group)
        parts = funcol.all_gather_tensor(summed + 1, 0, group)
        return funcol.reduce_scatter_tensor(parts - tensor.sum(), "sum", 0, group) / 2

    expected = funcol.wait_tensor(between(tensor))
    compiled = torch.compile(between, fullgraph=True)
    with inside_of_programs(3):
        for _ in range(2):
            same(compiled(tensor.to(TPU)), expected)

    def several(tensor: Tensor) -> list[Tensor]:
        # None depends on another, and one's result nobody uses: all ranks make them in the same order nevertheless.
        funcol.all_reduce(tensor, "product", group)
        least, most = funcol.all_reduce(tensor, "min", group), funcol.all_reduce(tensor + 1, "max", group)
        moved = funcol.all_to_all_single(tensor * 3, None, None, group)
        return [least * 2, most - least, moved, funcol.all_gather_tensor(tensor, 1, group) + 1]

    for got, want in zip(torch.compile(several, fullgraph=True)(tensor.to(TPU)), several(tensor), strict=True):
        same(got, funcol.wait_tensor(want))

    def bitwise(tensor: Tensor) -> Tensor:
        # XLA's CPU backend can't compile this one itself.
        return funcol.all_reduce(tensor + 1, "bor", group) * 2

    numbers = values(torch.int32, 40)
    same(torch.compile(bitwise)(numbers.to(TPU)), bitwise(numbers))

    def in_place(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor + 1

    same(torch.compile(in_place)(tensor.to(TPU)), in_place(tensor.clone()))

    if WORLD % 2 == 0:
        rows = mesh(WORLD // 2, 2, names=("outer", "inner"))["inner"].get_group()

        def within_a_part(tensor: Tensor) -> Tensor:
            return funcol.all_reduce(tensor * 2, "sum", rows) + 1

        with inside_of_programs(1):
            same(torch.compile(within_a_part)(tensor.to(TPU)), within_a_part(tensor))


@scenario
def compiled_but_split() -> None:
    # A graph that can't be compiled whole is split at its collectives, and gives the same numbers.
    from podring import _graphs

    group = world()

    def between(tensor: Tensor) -> Tensor:
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    def refuse(graph: object) -> object:
        raise ValueError("this graph is refused")

    whole = _graphs._with_twins
    _graphs._with_twins = refuse  # type: ignore[assignment]
    try:
        tensor = values(torch.float32, 24)
        with inside_of_programs(0, split=1):
            same(torch.compile(between)(tensor.to(TPU)), between(tensor))
    finally:
        _graphs._with_twins = whole


@scenario
def let_go_of_beside_programs() -> None:
    # What nobody holds any more is let go of when its collective ends, which a program may see to that waits for its
    # own, on a thread of torch_tpu's: torch_tpu ends the process if a tensor goes there.
    group = world()
    ours, parts = torch.ones(24), torch.ones(4, 6)

    def between(tensor: Tensor) -> Tensor:
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    compiled = torch.compile(between)
    for _ in range(100):
        dist.all_reduce(ours.to(TPU), async_op=True)
        dist.isend(parts.to(TPU), (RANK + 1) % WORLD)
        dist.irecv(torch.empty(4, 6, device=TPU), (RANK - 1) % WORLD)
        same(compiled(ours.to(TPU)), ours * 2 * WORLD + 1)


@scenario
def twins_end_with_their_groups() -> None:
    from podring import _graphs
    from torch._C._distributed_c10d import _resolve_process_group

    # Earlier scenarios' graphs may hold groups that live on.
    before = set(_graphs._twins)
    names: list[Any] = []
    kept: Any = None
    for _ in range(1000 if os.environ.get("PODRING_VCHIP_ALL") else 50):
        group: Any = dist.new_group(list(range(WORLD)))
        twin = _graphs._twin(group.group_name)
        assert _graphs._twin(group.group_name) is twin and _graphs._twins[group] is twin
        names.append(twin.group_name)
        kept = kept or group
        dist.destroy_process_group(group)
    # One is still held by somebody, a compiled graph perhaps, and the last one by nobody.
    del group, twin
    gc.collect()
    assert len(set(names)) == len(names), names
    whole = _graphs._twin(world().group_name)
    left = dict(_graphs._twins)
    assert left.pop(world()) is whole and set(left) <= before, left
    for name in names:
        try:
            _resolve_process_group(name)
        except RuntimeError:
            continue
        raise AssertionError(f"{name} is still there")
    assert kept is not None


# Training, against one process with the whole batch on the CPU.


def mlp(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def batch(rank: int = RANK, width: int = 64) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 + rank))


def whole_batch() -> Tensor:
    return torch.cat([batch(rank) for rank in range(WORLD)])


def losses(model: nn.Module, inputs: Tensor, optimizer: Any = torch.optim.AdamW) -> list[float]:
    step = optimizer(model.parameters(), lr=0.01)
    seen = []
    for _ in range(3):
        loss = model(inputs).pow(2).mean()
        loss.backward()
        step.step()
        step.zero_grad()
        loss = loss.detach()
        seen.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    return seen


def averaged(seen: list[float]) -> list[float]:
    mean = torch.tensor(seen, device=TPU)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.tolist()


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("tpu", shape or (WORLD,), mesh_dim_names=names)


@scenario
def eager_training() -> None:
    close(losses(mlp().to(TPU), batch(0).to(TPU)), losses(mlp(), batch(0)))

    def layer() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    inputs = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    close(losses(layer().to(TPU), inputs.to(TPU)), losses(layer(), inputs))


@scenario
def future_callbacks() -> None:
    total = float(sum(range(1, WORLD + 1)))

    def reduced(late: bool) -> Any:
        """A collective's future: complete on every rank, or on none, as rank 0 has yet to come."""
        tensor = torch.full((1000,), RANK + 1.0, device=TPU)
        if late and RANK == 0:
            time.sleep(0.2)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if not late:
            work.wait()
        return work.get_future()

    def chained(future: Any) -> Tensor:
        work = dist.all_reduce(future.value()[0], async_op=True)
        assert work is not None
        return work.get_future().wait()[0]

    def raising(future: Any) -> None:
        raise ValueError(f"{future.value()[0].numel()} elements")

    for late in (False, True):
        assert reduced(late).then(lambda future: 7).wait() == 7
        same(reduced(late).then(lambda future: future.value()[0] * 2).wait(), torch.full((1000,), 2 * total))
        same(reduced(late).then(chained).wait(), torch.full((1000,), WORLD * total))
        # A callback of a callback's value, on the host's memory.
        twice = reduced(late).then(lambda future: future.value()[0] + 1).then(lambda future: future.value().cpu())
        assert twice.wait().tolist() == [total + 1] * 1000
        try:
            reduced(late).then(raising).wait()
        except RuntimeError as error:
            assert "ValueError: 1000 elements" in str(error), error
        else:
            raise AssertionError("the callback's error is lost")
        future = reduced(late)
        told = torch.futures.Future[float]()
        future.add_done_callback(lambda future, told=told: told.set_result(future.value()[0].sum().item()))
        future.wait()
        assert told.wait() == 1000 * total
    both = torch.futures.collect_all([reduced(True), reduced(False)]).then(
        lambda future: sum(one.value()[0] for one in future.value())
    )
    same(both.wait(), torch.full((1000,), 2 * total))


@scenario
def ddp_compressed() -> None:
    # The gradients of a bucket go as fp16, and a callback widens them again.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    def trained(device: torch.device) -> list[float]:
        # Several buckets.
        model = DistributedDataParallel(mlp().to(device), bucket_cap_mb=0.01)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return averaged(losses(model, batch().to(device), torch.optim.SGD))

    for got, expected in zip(trained(TPU), trained(torch.device("cpu")), strict=True):
        assert abs(got - expected) <= 1e-3 * abs(expected), (got, expected)


@scenario
def ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    expected = losses(mlp(), whole_batch())
    close(averaged(losses(DistributedDataParallel(mlp().to(TPU)), batch().to(TPU))), expected)
    close(averaged(losses(DistributedDataParallel(mlp().to(TPU), device_ids=[0]), batch().to(TPU))), expected)


@scenario
def sync_batch_norm() -> None:
    from torch.nn.parallel import DistributedDataParallel

    def normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))

    synced = nn.SyncBatchNorm.convert_sync_batchnorm(normed()).to(TPU)
    model, whole = DistributedDataParallel(synced), normed()
    # A bias in front of a norm has no gradient: AdamW would scale its rounding errors up, and the means follow it.
    sgd = torch.optim.SGD
    close(averaged(losses(model, batch().to(TPU), sgd)), losses(whole, whole_batch(), sgd))
    for name in ("running_mean", "running_var"):
        got, expected = synced.state_dict()[f"1.{name}"], whole.state_dict()[f"1.{name}"]
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


@scenario
def fsdp2() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    model = mlp().to(TPU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    close(averaged(losses(model, batch().to(TPU))), losses(mlp(), whole_batch()))
    model(batch().to(TPU)).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor) and norm.full_tensor().cpu() > 0

    narrow = mlp().to(TPU)
    fully_shard(narrow, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = losses(narrow, batch().to(TPU))
    assert seen[-1] < seen[0], seen


@scenario
def hsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = mlp().to(TPU)
    fully_shard(model, mesh=mesh(WORLD // 2, 2, names=("replicate", "shard")))
    close(averaged(losses(model, batch().to(TPU))), losses(mlp(), whole_batch()))


@scenario
def dtensor() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    whole = torch.arange(64.0).reshape(8, 8)
    rows = distribute_tensor(whole.to(TPU), mesh(), [Shard(0)])
    columns = rows.redistribute(mesh(), [Shard(1)])
    same(columns.to_local(), whole.chunk(WORLD, 1)[RANK])
    same(columns.redistribute(mesh(), [Replicate()]).to_local(), whole)
    partial = DTensor.from_local(torch.ones(8, 8, device=TPU), mesh(), [Partial()])
    same(partial.redistribute(mesh(), [Replicate()]).to_local(), torch.full((8, 8), float(WORLD)))
    same(partial.redistribute(mesh(), [Shard(0)]).to_local(), torch.full((8 // WORLD, 8), float(WORLD)))
    product = rows @ distribute_tensor(whole.to(TPU), mesh(), [Replicate()])
    assert isinstance(product, DTensor)
    torch.testing.assert_close(product.full_tensor().cpu(), whole @ whole)


def parallel(sequence: bool = False) -> nn.Module:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if sequence:
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    return parallelize_module(mlp().to(TPU), mesh(), plan)


@scenario
def tensor_parallel() -> None:
    sgd = torch.optim.SGD
    close(losses(parallel(), batch(0).to(TPU), sgd), losses(mlp(), batch(0), sgd))
    seen = averaged(losses(parallel(sequence=True), batch().to(TPU), sgd))
    assert seen[-1] < seen[0], seen


@scenario
def checkpoint() -> None:
    saves_and_loads()


@scenario
def checkpoint_in_background() -> None:
    saves_and_loads(in_background=True)


def saves_and_loads(in_background: bool = False) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    place = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(place, 0, device=TPU)
    assert place[0] is not None

    def sharded(scale: float) -> Any:
        model = mlp().to(TPU)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        return fully_shard(model)

    saved, loaded = sharded(1.0), sharded(0.0)
    if in_background:
        dcp.async_save(saved.state_dict(), checkpoint_id=place[0]).result()  # type: ignore[union-attr]
    else:
        dcp.save(saved.state_dict(), checkpoint_id=place[0])
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=place[0])
    loaded.load_state_dict(state)
    for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        same(other.full_tensor(), one.full_tensor().cpu())


@scenario
def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    inputs = torch.cat([batch(0), batch(1)])

    def criterion(out: Tensor, wanted: Tensor) -> Tensor:
        return (out - wanted).pow(2).mean()

    # Two stages, on the first and the last rank of a group of two.
    kind: Any = Schedule1F1B
    pair: Any = None
    if THEIRS:
        # torch_tpu (0.2.0) has no groups that some ranks are in none of. And its sends wait until they are received,
        # while one forward and one backward in turns has two stages send to each other before they receive.
        kind, pair = ScheduleGPipe, mesh(WORLD // 2, 2, names=("outer", "inner")).get_group("inner")
    else:
        pair = dist.new_group([0, 1])
    if THEIRS or RANK < 2:
        place = RANK % 2
        layers = list(mlp())
        part = nn.Sequential(*(layers[:2] if place == 0 else layers[2:])).to(TPU)
        stage = PipelineStage(part, place, 2, TPU, group=pair)
        schedule = kind(stage, 2, loss_fn=criterion)
        if place == 0:
            schedule.step(inputs.to(TPU))
        else:
            seen: list[Tensor] = []
            schedule.step(target=torch.zeros(8, 64, device=TPU), losses=seen)
            whole = mlp()
            expected = [float(criterion(whole(part), torch.zeros(4, 64))) for part in inputs.chunk(2)]
            close([float(loss) for loss in seen], expected)
    dist.barrier()


@scenario
def compiled_training() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    close(losses(torch.compile(mlp().to(TPU)), batch(0).to(TPU)), losses(mlp(), batch(0)))  # type: ignore[arg-type]
    expected = losses(mlp(), whole_batch())
    wrapped: Any = torch.compile(DistributedDataParallel(mlp().to(TPU)))
    close(averaged(losses(wrapped, batch().to(TPU))), expected)

    model = mlp().to(TPU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.compile()
            fully_shard(layer)
    fully_shard(model)
    close(averaged(losses(model, batch().to(TPU))), expected)

    sgd = torch.optim.SGD
    shards: Any = torch.compile(parallel())
    close(losses(shards, batch(0).to(TPU), sgd), losses(mlp(), batch(0), sgd))


# torch_tpu's own process group (PODRING_DISABLE=1), whose collectives are programs. It has none for CPU tensors.


@scenario
def their_collectives() -> None:
    peers = range(WORLD)
    group = world()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        sent = [values(dtype, 6 * WORLD, rank).reshape(2 * WORLD, 3) for rank in peers]
        mine = sent[RANK].to(TPU)
        stack = torch.stack(sent)
        for name, expected in (
            ("SUM", stack.sum(0).to(dtype)),
            ("MAX", stack.amax(0)),
            ("MIN", stack.amin(0)),
            ("PRODUCT", stack.prod(0).to(dtype)),
        ):
            tensor = mine.clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            same(tensor, expected)
        if dtype.is_floating_point:
            tensor = mine.clone()
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            same(tensor, (stack.sum(0) / WORLD).to(dtype))
        gathered = torch.zeros(2 * WORLD * WORLD, 3, dtype=dtype, device=TPU)
        dist.all_gather_into_tensor(gathered, mine)
        same(gathered, torch.cat(sent))
        listed = [torch.zeros_like(mine) for _ in peers]
        dist.all_gather(listed, mine)
        for got, expected in zip(listed, sent, strict=True):
            same(got, expected)
        part = torch.zeros(2, 3, dtype=dtype, device=TPU)
        dist.reduce_scatter_tensor(part, mine)
        same(part, stack.sum(0).to(dtype)[2 * RANK : 2 * RANK + 2])
        exchanged = torch.zeros_like(mine)
        dist.all_to_all_single(exchanged, mine)
        same(exchanged, torch.cat([one[2 * RANK : 2 * RANK + 2] for one in sent]))
        told = mine.clone()
        dist.broadcast(told, 1)
        same(told, sent[1])
        same(funcol.wait_tensor(funcol.all_gather_tensor(mine, 1, group)), torch.cat(sent, 1))
    dist.barrier()

    def between(tensor: Tensor) -> Tensor:
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    compiled = torch.compile(between, fullgraph=True)
    same(compiled(torch.full((4,), float(RANK), device=TPU)), torch.full((4,), 2.0 * sum(peers) + 1))


@scenario
def their_uneven_exchange() -> None:
    # Rank r sends 1 + (r + s) % WORLD rows to rank s: torch_tpu (0.2.0) wants as many in all on every rank.
    sizes = [1 + (RANK + peer) % WORLD for peer in range(WORLD)]
    sent = [values(torch.float32, 3 * sum(sizes), rank).reshape(-1, 3) for rank in range(WORLD)]
    got = torch.zeros_like(sent[0], device=TPU)
    dist.all_to_all_single(got, sent[RANK].to(TPU), sizes, sizes)
    expected = []
    for rank in range(WORLD):
        parts = sent[rank].split([1 + (rank + peer) % WORLD for peer in range(WORLD)])
        expected.append(parts[RANK])
    same(got, torch.cat(expected))


@scenario
def their_subgroups() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("tpu", (WORLD // 2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.full((4,), float(RANK), device=TPU)
    dist.all_reduce(tensor, group=grid.get_group("inner"))
    same(tensor, torch.full((4,), float(2 * (RANK // 2 * 2) + 1)))


@scenario
def their_bitwise() -> None:
    # XLA's CPU backend has no bitwise reduction: the program calls the fabric.
    numbers = [values(torch.int32, 8, rank) for rank in range(WORLD)]
    for name, combine in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
        tensor = numbers[RANK].to(TPU)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        same(tensor, functools.reduce(combine, numbers))


@scenario
def their_limits() -> None:
    # docs/virtual-slice.md has these errors. Its collectives are for tpu tensors alone.
    tensor = torch.ones(4, device=TPU)
    refused(RuntimeError, "No backend type associated with device type cpu", lambda: dist.all_reduce(torch.ones(4)))
    refused(ValueError, "monitored_barrier requires a group with a CPU", dist.monitored_barrier)
    refused(AssertionError, "A CPU backend must be enabled for async save", checkpoint_in_background)
    refused(RuntimeError, "expected output for stacking", sync_batch_norm)
    refused(RuntimeError, "does not support recvAnysource", lambda: dist.recv(tensor))
    dist.all_reduce(tensor)
    same(tensor, torch.full((4,), float(WORLD)))


@scenario
def device_facts() -> None:
    properties = torch.tpu.get_device_properties()  # type: ignore[attr-defined]
    assert (properties.name, properties.total_memory) == ("TPU v5 lite", 16 << 30), properties
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
    assert torch.tpu.is_available() and torch.tpu.memory_allocated() > 0  # type: ignore[attr-defined]
    torch.accelerator.synchronize()
    assert dist.get_backend() == os.environ.get("EXPECT_BACKEND", "tpu"), dist.get_backend()
    torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
    pinned = torch.ones(1000).pin_memory()
    same(pinned.to(TPU), torch.ones(1000))


def main() -> int:
    """Runs the named scenarios; the exit code is 1 if one failed on this rank."""
    dist.init_process_group("tpu")
    failed = False
    for name in sys.argv[1:]:
        begin = time.monotonic()
        error = ""
        try:
            SCENARIOS[name]()
        except BaseException:
            failed = True
            error = traceback.format_exc()[-4000:]
        said = {"name": name, "rank": RANK, "error": error, "seconds": round(time.monotonic() - begin, 2)}
        print("SCENARIO " + json.dumps(said), flush=True)
        # Lines of several ranks, and of the C++ underneath, mix on one stream.
        if folder := os.environ.get("SCENARIOS_SAY"):
            with Path(folder, f"{RANK}.jsonl").open("a") as record:
                record.write(json.dumps(said) + "\n")
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
