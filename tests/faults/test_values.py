"""Element types, reductions and layouts that peers refuse or get wrong, each by its own name. tests/differential has
random ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run

Op: Any = dist.ReduceOp
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
MOVED = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32)
EVERY = (*FLOATS, *INTEGERS, *MOVED, torch.bool, torch.complex64, torch.complex128)


default_group = dist.distributed_c10d._get_default_group


def group_all_reduce(tensor: Tensor, op: Any) -> None:
    """By the group's own method: torch's function refuses some reductions of complex numbers itself."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    default_group().allreduce([tensor], options).wait()


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_every_dtype_is_moved() -> None:
    """Broadcast, all_gather, all_to_all and send of every bit pattern of a byte, the 8-bit floats' other kinds too."""

    def body() -> list[str]:
        rank, wrong = dist.get_rank(), []
        for dtype in EVERY:
            patterns = torch.arange(256, dtype=torch.uint8) if dtype is not torch.bool else torch.arange(256) % 2 == 1
            mine = (patterns.roll(rank).view(torch.uint8) if dtype is torch.bool else patterns.roll(rank)).view(dtype)
            other = (patterns.roll(1 - rank).view(torch.uint8)).view(dtype)
            both = [mine, other] if rank == 0 else [other, mine]
            real = torch.view_as_real(mine) if dtype is torch.complex32 else mine
            got = {"broadcast": real.clone(), "send": torch.zeros_like(real)}
            dist.broadcast(got["broadcast"], 0)
            outputs = [torch.zeros_like(real) for _ in range(2)]
            dist.all_gather(outputs, real)
            exchanged = torch.zeros_like(real)
            dist.all_to_all_single(exchanged, real.clone())
            works = [dist.isend(real, 1 - rank), dist.irecv(got["send"], 1 - rank)]
            for work in works:
                assert work is not None
                work.wait()
            half = len(raw(mine)) // 2
            here, there = raw(mine), raw(other)
            swapped = (here[:half], there[:half]) if rank == 0 else (there[half:], here[half:])
            for name, tensor, want in (
                ("broadcast", got["broadcast"], raw(both[0])),
                ("all_gather", torch.cat(outputs), torch.cat([raw(tensor) for tensor in both])),
                ("all_to_all", exchanged, torch.cat(swapped)),
                ("send", got["send"], there),
            ):
                if not torch.equal(raw(tensor).reshape(-1), want):
                    wrong.append(f"{name} of {dtype}")
        return wrong

    assert run(body, 2) == [[], []]


def test_sum_and_avg_of_every_dtype() -> None:
    """Means are means, not sums; integers truncate toward zero."""

    def body() -> list[str]:
        rank, wrong = dist.get_rank(), []
        for dtype in (*FLOATS, *INTEGERS, torch.complex64, torch.complex128):
            for op, wants in ((Op.SUM, (7, 3)), (Op.AVG, (3.5, 1.5))):
                tensor = torch.tensor([3 + rank, 1 + rank]).to(dtype)
                dist.all_reduce(tensor, op)
                truncated = dtype in INTEGERS
                if [complex(number) for number in tensor.to(torch.complex128)] != [
                    complex(int(want) if truncated else want) for want in wants
                ]:
                    wrong.append(f"{op} of {dtype}: {tensor}")
        negative = torch.tensor([-3 - rank], dtype=torch.int16)
        dist.all_reduce(negative, Op.AVG)
        if negative.item() != -3:
            wrong.append(f"AVG of -3 and -4: {negative}")
        return wrong

    assert run(body, 2) == [[], []]


def test_bool_is_logic() -> None:
    """SUM and MAX are or, PRODUCT and MIN are and, BXOR is exclusive or; AVG is refused by name."""

    def body() -> list[Any]:
        mine = torch.tensor([False, False, True, True] if dist.get_rank() == 0 else [False, True, False, True])
        results: list[Any] = []
        for op in (Op.SUM, Op.MAX, Op.BOR, Op.PRODUCT, Op.MIN, Op.BAND, Op.BXOR):
            tensor = mine.clone()
            dist.all_reduce(tensor, op)
            results.append(tensor.int().tolist())
        with pytest.raises(ValueError, match=r"AVG.*bool|bool.*AVG"):
            dist.all_reduce(mine.clone(), Op.AVG)
        return results

    union, both = [0, 1, 1, 1], [0, 0, 0, 1]
    assert run(body, 2) == [[union, union, union, both, both, both, [0, 1, 1, 0]]] * 2


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_premul_sum_by_powers_of_two_is_exact(as_tensor: bool) -> None:
    """At every float dtype, also where the results are subnormal numbers: peers gave zeros for bfloat16."""

    def body() -> list[str]:
        wrong = []
        for dtype in (*FLOATS, torch.complex64, torch.complex128):
            real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
            normal, eps = torch.finfo(real).smallest_normal, torch.finfo(real).eps
            least = torch.finfo(torch.float64 if real is torch.float64 else torch.float32)
            pairs = [(1.0, 0.25), (1.0, 2.0), (1.0, -0.5), (normal, 0.5), (normal, eps / 2), (normal, eps)]
            for value, factor in pairs:
                if abs(value * factor) < least.smallest_normal * least.eps:
                    continue  # no number of the accumulator's
                tensor = torch.full((5,), value, dtype=torch.complex128 if dtype.is_complex else torch.float64)
                tensor = tensor.to(dtype)
                given = torch.tensor(factor, dtype=torch.float64) if as_tensor else factor
                dist.all_reduce(tensor, dist._make_nccl_premul_sum(given))
                got = complex(tensor.to(torch.complex128)[4].item())
                if got != 2 * value * factor or got == 0:
                    wrong.append(f"{dtype}: {value} * {factor}, twice: {got}")
        return wrong

    assert run(body, 2) == [[], []]


def test_complex_numbers() -> None:
    """Sums, products, and conjugate views as inputs."""

    def body() -> list[Any]:
        rank = dist.get_rank()
        total = torch.tensor([1 + 2j, 3j]) * (rank + 1)
        dist.all_reduce(total)
        product = torch.tensor([1 + 2j if rank == 0 else 3 - 1j])
        group_all_reduce(product, Op.PRODUCT)
        view = (torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1)).conj()
        assert view.is_conj()
        gathered = [torch.zeros(2, dtype=torch.complex64) for _ in range(2)]
        default_group().allgather([gathered], [view]).wait()
        return [total.tolist(), product.tolist(), [tensor.tolist() for tensor in gathered]]

    want = [[3 + 6j, 9j], [5 + 5j], [[1 - 2j, 3 + 4j], [2 - 4j, 6 + 8j]]]
    assert run(body, 2) == [want] * 2


def test_lazy_bits() -> None:
    """Outputs that are lazily conjugated or negated views: torch's dispatcher would give a backend copies of them, and
    the results would be lost with no error."""

    def body() -> list[Any]:
        rank = dist.get_rank()
        negated = torch._neg_view(torch.full((2,), -1.0 - rank))
        dist.all_reduce(negated)
        taken = torch._neg_view(torch.zeros(2)) if rank else torch.full((2,), 5.0)
        dist.broadcast(taken, 0)
        conjugated = torch.tensor([1 - 2j, 3j]).conj()
        group_all_reduce(conjugated, Op.SUM)
        assert conjugated.is_conj() and negated.is_neg()
        return [negated.tolist(), taken.tolist(), conjugated.tolist()]

    assert run(body, 2) == [[[3.0, 3.0], [5.0, 5.0], [2 + 4j, -6j]]] * 2


def test_what_a_dtype_has_not_is_a_named_error() -> None:
    """The message names reduction and dtype, and the group goes on."""

    def body() -> float:
        refused = [(torch.int32, Op.PREMUL_SUM), (torch.bool, Op.AVG)]
        refused += [(dtype, op) for dtype in (*FLOATS, torch.complex64) for op in (Op.BAND, Op.BOR, Op.BXOR)]
        refused += [(torch.complex64, op) for op in (Op.MIN, Op.MAX)]
        refused += [(dtype, Op.SUM) for dtype in MOVED]
        for dtype, op in refused:
            given = dist._make_nccl_premul_sum(2.0) if op == Op.PREMUL_SUM else op
            with pytest.raises(ValueError) as caught:
                group_all_reduce(torch.zeros(3, dtype=dtype), given)
            assert str(dtype).removeprefix("torch.") in str(caught.value), caught.value
            assert str(op).rpartition(".")[2] in str(caught.value), caught.value
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(body, 2) == [2.0, 2.0]


def test_expanded_output_is_refused_and_expanded_input_is_not() -> None:
    def body() -> list[float]:
        with pytest.raises(ValueError, match="expanded tensor can't be written"):
            dist.all_reduce(torch.ones(1).expand(4))
        with pytest.raises(ValueError, match="expanded tensor can't be written"):
            dist.broadcast(torch.ones(3, 1).expand(3, 2), 0)
        whole = torch.zeros(6)
        dist.all_gather_into_tensor(whole, torch.tensor([dist.get_rank() + 1.0]).expand(3))
        return whole.tolist()

    assert run(body, 2) == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2


def test_nothing_and_a_single_number() -> None:
    """numel 0 and 0-dim through every operation that takes them."""

    def body() -> bool:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for tensor in (torch.empty(0), torch.empty(0, 3), torch.empty(2, 0)):
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 1)
            dist.reduce(tensor, 0)
            dist.all_gather([torch.empty_like(tensor) for _ in range(ranks)], tensor)
            dist.reduce_scatter(torch.empty_like(tensor), [tensor] * ranks)
            dist.all_to_all([torch.empty_like(tensor) for _ in range(ranks)], [tensor] * ranks)
            dist.gather(tensor, [torch.empty_like(tensor) for _ in range(ranks)] if rank == 0 else None, 0)
            dist.scatter(tensor, [tensor] * ranks if rank == 0 else None, 0)
            if rank == 0:
                dist.send(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)
        number = torch.tensor(float(rank))
        dist.all_reduce(number)
        numbers = [torch.tensor(0.0) for _ in range(ranks)]
        dist.all_gather(numbers, torch.tensor(float(rank)))
        return number.item() == sum(range(ranks)) and [value.item() for value in numbers] == list(range(ranks))

    assert run(body, 3) == [True] * 3


def test_rank_that_sends_nothing_in_all_to_all() -> None:
    def body() -> list[float]:
        rank = dist.get_rank()
        give = [0, 0, 0] if rank == 1 else [1, 1, 1]
        output = torch.zeros(2)
        dist.all_to_all_single(output, torch.full((sum(give),), float(rank)), [1, 0, 1], give)
        outputs = [torch.zeros(count) for count in (1, 0, 1)]
        dist.all_to_all(outputs, [torch.full((count,), float(rank)) for count in give])
        return [*output.tolist(), *torch.cat(outputs).tolist()]

    assert run(body, 3) == [[0.0, 2.0, 0.0, 2.0]] * 3


def test_uneven_reduce_scatter() -> None:
    """Blocks of 1, 0 and 5 elements."""

    def body() -> list[float]:
        sizes = [1, 0, 5]
        output = torch.zeros(sizes[dist.get_rank()])
        dist.reduce_scatter(output, [torch.full((size,), block + 1.0) for block, size in enumerate(sizes)])
        return output.tolist()

    assert run(body, 3) == [[3.0], [], [9.0] * 5]


def test_sparse_sum() -> None:
    """COO tensors whose indices differ between ranks and overlap in part; another reduction is refused by name."""

    def body() -> list[Any]:
        rank = dist.get_rank()
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), [1.0, 10.0 * (rank + 1)], (4,))
        dist.all_reduce(tensor)
        empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), [], (4,))
        dist.all_reduce(empty)
        with pytest.raises(RuntimeError, match="SUM"):
            dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0]]), [1.0], (4,)), Op.MAX)
        return [tensor.to_dense().tolist(), empty.to_dense().sum().item()]

    assert run(body, 3) == [[[3.0, 10.0, 20.0, 30.0], 0.0]] * 3


def test_object_collectives_use_the_groups_device() -> None:
    """Objects travel as bytes on the device of the group's backend, also when the default group has another too."""

    def body() -> bool:
        group: Any = dist.new_group(backend="cpu:tpu") if dist.get_backend() == "tpu" else None
        got: list[object] = [None, None]
        dist.all_gather_object(got, {"rank": dist.get_rank()}, group=group)
        return got == [{"rank": 0}, {"rank": 1}]

    assert run(body, 2) == [True, True]


Call = Callable[[list[Tensor], list[Tensor]], None]


def aliased_calls(rank: int, count: int) -> dict[str, tuple[Tensor, list[Tensor], list[Tensor], Call]]:
    """By name: all the memory, what is read, what is written, and the call. The memory is new on every call."""
    other = 1 - rank

    calls: dict[str, tuple[Tensor, list[Tensor], list[Tensor], Call]] = {}

    def add(
        name: str, reads: Callable[[Tensor], list[Tensor]], writes: Callable[[Tensor], list[Tensor]], call: Call
    ) -> None:
        base = torch.arange(3 * count, dtype=torch.float32) + 7.0 * rank
        calls[name] = (base, reads(base), writes(base), call)

    def block(*numbers: int) -> Callable[[Tensor], list[Tensor]]:
        return lambda base: [base[number * count : (number + 1) * count] for number in numbers]

    def both(base: Tensor) -> list[Tensor]:
        return [base[: 2 * count]]

    def middle(base: Tensor) -> list[Tensor]:
        return [base[count // 2 : count // 2 + count]]

    def none(_: Tensor) -> list[Tensor]:
        return []

    def all_gather_into_tensor(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.all_gather_into_tensor(writes[0], reads[0])

    def all_gather(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.all_gather(writes, reads[0])

    def all_to_all(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.all_to_all(writes, reads)

    def all_to_all_single(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.all_to_all_single(writes[0], reads[0])

    def scatter(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.scatter(writes[0], reads or None, src=0)

    def gather(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.gather(reads[0], writes or None, dst=0)

    def reduce_scatter_tensor(reads: list[Tensor], writes: list[Tensor]) -> None:
        dist.reduce_scatter_tensor(writes[0], reads[0])

    root = rank == 0
    add("all_gather_into_tensor of another slot", block(other), both, all_gather_into_tensor)
    add("all_gather_into_tensor of the own slot", block(rank), both, all_gather_into_tensor)
    add("all_gather_into_tensor of two halves", middle, both, all_gather_into_tensor)
    add("all_gather of another output", block(other), block(0, 1), all_gather)
    add("all_gather into one tensor", block(2), block(0, 0), all_gather)
    add("all_to_all of the lists exchanged", block(0, 1), block(1, 0), all_to_all)
    add("all_to_all in place", block(0, 1), block(0, 1), all_to_all)
    add("all_to_all_single in place", both, both, all_to_all_single)
    add("scatter into another input", block(0, 1) if root else none, block(1), scatter)
    add("scatter into the own input", block(0, 1) if root else none, block(0), scatter)
    add("gather of another output", block(1), block(0, 1) if root else none, gather)
    add("reduce_scatter_tensor into two halves", both, middle, reduce_scatter_tensor)
    add("reduce_scatter_tensor into another block", both, block(other), reduce_scatter_tensor)
    add("reduce_scatter_tensor into the own block", both, block(rank), reduce_scatter_tensor)
    return calls


@pytest.mark.parametrize("count", [4, 100_000])
def test_tensors_of_a_call_that_share_memory(count: int) -> None:
    """Memory ends as if everything had been read first, then written, one output after the other."""

    def body() -> list[str]:
        rank, wrong = dist.get_rank(), []
        for _ in range(10):
            for name, (base, reads, writes, call) in aliased_calls(rank, count).items():
                expected = base.clone()
                apart = [torch.full_like(tensor, -1.0) for tensor in writes]
                call([tensor.clone() for tensor in reads], apart)
                for place, result in zip(writes, apart, strict=True):
                    expected.as_strided(place.size(), place.stride(), place.storage_offset()).copy_(result)
                call(reads, writes)
                if not torch.equal(base, expected):
                    wrong.append(name)
        return wrong

    assert run(body, 2) == [[], []]
