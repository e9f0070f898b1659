"""What is wrong is an exception on every rank, inside the timeout, that names the operation, its sequence number and
the ranks: never a crash, a hang or wrong data."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import End, attempt, report, run

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
ODD = 1
"""The rank that calls something else."""
TIMEOUT = 10.0


def check(ends: list[End], op: str, within: float, *named: int, kind: str = "DistBackendError") -> None:
    """Every one of the ends is an exception of that kind, in time, with op, sequence and the ranks `named`."""
    assert ends
    for end in ends:
        assert end.error is not None, report(ends)
        message = end.error.message
        assert end.error.is_a(kind), report(ends)
        assert op in message, report(ends)
        assert re.search(r"seq\w*\W{0,3}\d", message), report(ends)
        for rank in named:
            assert re.search(rf"\b{rank}\b", message), f"rank {rank} is not named{report(ends)}"
        assert end.seconds < within, report(ends)


def odd(usual: Callable[[], object], other: Callable[[], object], then: Callable[[], object]) -> Callable[[], None]:
    """Two good collectives, then rank ODD calls another than the rest, then all do `then`."""

    def body() -> None:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
        (other if dist.get_rank() == ODD else usual)()
        then()

    return body


def gathered(n: int, dtype: torch.dtype = torch.float32) -> None:
    dist.all_gather_into_tensor(torch.empty(3 * n, dtype=dtype), torch.ones(n, dtype=dtype))


MISMATCHES: dict[str, tuple[str, Callable[[], object], Callable[[], object]]] = {
    "count": ("all_reduce", lambda: dist.all_reduce(torch.ones(8)), lambda: dist.all_reduce(torch.ones(9))),
    "large count": (
        "all_reduce",
        lambda: dist.all_reduce(torch.ones(1 << 20)),
        lambda: dist.all_reduce(torch.ones((1 << 20) - 1)),
    ),
    "small beside large": (
        "all_reduce",
        lambda: dist.all_reduce(torch.ones(1 << 20)),
        lambda: dist.all_reduce(torch.ones(1)),
    ),
    "dtype": (
        "all_reduce",
        lambda: dist.all_reduce(torch.ones(8)),
        lambda: dist.all_reduce(torch.ones(8, dtype=torch.int32)),
    ),
    "reduction": ("all_reduce", lambda: dist.all_reduce(torch.ones(8)), lambda: dist.all_reduce(torch.ones(8), MAX)),
    "op": ("all_reduce", lambda: dist.all_reduce(torch.ones(8)), lambda: dist.broadcast(torch.ones(8), 0)),
    "op, not barrier": ("barrier", dist.barrier, lambda: dist.all_reduce(torch.ones(8))),
    "root": ("broadcast", lambda: dist.broadcast(torch.ones(8), 0), lambda: dist.broadcast(torch.ones(8), 2)),
    "root of reduce": ("reduce", lambda: dist.reduce(torch.ones(8), 0), lambda: dist.reduce(torch.ones(8), 2)),
    "count of all_gather": ("all_gather", lambda: gathered(4), lambda: gathered(5)),
    "dtype of all_gather": ("all_gather", lambda: gathered(4), lambda: gathered(4, torch.float64)),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(case: str) -> None:
    op, usual, other = MISMATCHES[case]
    # A rank that only sends may be done before anybody can contradict it; the next collective tells it at the latest.
    then = dist.barrier if case.startswith("root") else lambda: None
    ends = attempt(odd(usual, other, then), 3, op_timeout=TIMEOUT, timeout=TIMEOUT + 10)
    check(ends, op, TIMEOUT, ODD)


def test_group_is_broken_after_a_mismatch() -> None:
    """What comes after fails too, with the first cause, instead of pairing with something else."""

    def body() -> str:
        try:
            dist.all_reduce(torch.ones(4 + (dist.get_rank() == ODD)))
        except Exception:
            pass
        else:
            return "no error"
        try:
            dist.all_reduce(torch.ones(4))
        except Exception as error:
            return str(error)
        return "no second error"

    for end in attempt(body, 3, op_timeout=TIMEOUT, timeout=TIMEOUT + 10):
        assert end.returned and "all_reduce" in end.value, end


def refused(call: Callable[[], object], *kinds: str, says: str = "") -> None:
    """All ranks make a call that is wrong by itself; each refuses it at once, and the group goes on working."""

    def body() -> tuple[list[str], str, float]:
        try:
            call()
        except Exception as error:
            refusal = [kind.__name__ for kind in type(error).__mro__], str(error)
        else:
            refusal = ["nothing"], "no error"
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return *refusal, tensor[0].item()

    for names, message, total in run(body, 2, timeout=30, op_timeout=10):
        assert set(names) & set(kinds), (names, message)
        assert says in message, message
        assert total == 2.0


def test_device_without_a_backend() -> None:
    """Past torch's dispatcher: torch itself answers collectives of meta tensors, without any backend."""

    def call() -> None:
        group: Any = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device("cpu")).allreduce([torch.ones(3, device="meta")]).wait()

    refused(call, "RuntimeError", says="meta")


def test_reduction_a_dtype_has_not() -> None:
    refused(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), "ValueError", says="BAND")
    refused(lambda: dist.all_reduce(torch.ones(3) > 0, dist.ReduceOp.AVG), "ValueError", says="AVG")


def test_premul_sum_on_integers() -> None:
    factor = dist._make_nccl_premul_sum(2.0)
    refused(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), factor), "ValueError", says="PREMUL_SUM")


def test_output_that_overlaps_itself() -> None:
    refused(lambda: dist.all_reduce(torch.ones(1).expand(4)), "ValueError")


def test_output_of_another_size() -> None:
    refused(lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(2)), "ValueError", "RuntimeError")
    refused(lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(5)), "ValueError", "RuntimeError")


def test_output_of_another_dtype() -> None:
    outputs = [torch.empty(2, dtype=torch.float64) for _ in range(2)]
    refused(lambda: dist.all_gather(outputs, torch.ones(2)), "ValueError", "TypeError", "RuntimeError")


def test_root_outside_the_group() -> None:
    refused(lambda: dist.broadcast(torch.ones(2), 7), "ValueError", "RuntimeError")


def test_use_after_destroy() -> None:
    def body() -> list[str]:
        group = dist.distributed_c10d._get_default_group()
        backend: Any = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group()
        errors = []
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2), group=group),
            lambda: backend.allreduce([torch.ones(2)]).wait(),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                errors.append(type(error).__name__)
        return errors

    for names in run(body, 2, op_timeout=10, timeout=30):
        assert len(names) == 3, names


def test_second_init() -> None:
    def body() -> str:
        try:
            dist.init_process_group(harness.BACKEND, init_method="file:///nowhere", rank=0, world_size=1)
        except ValueError as error:
            return str(error)
        return ""

    assert all(run(body, 2))
