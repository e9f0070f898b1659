"""The inputs of `podring bench` are exact, and its check sees what is wrong."""

from __future__ import annotations

import pytest
import torch
from podring._bench_pattern import PERIOD, PREMUL_FACTOR, Pattern, poison

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
TYPES = [*FLOATS, *INTEGERS, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [1, 2, 3, 4, 7, 8, 16, 33, 64]


def brute(redop: str, parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The reduction in float64, where every value here is exact, rounded once at the end."""
    wide = torch.stack([part.double() for part in parts])
    if dtype is torch.bool:
        return {"SUM": wide.amax(0), "MAX": wide.amax(0), "PRODUCT": wide.amin(0), "MIN": wide.amin(0)}[redop].bool()
    result = {
        "SUM": lambda: wide.sum(0),
        "AVG": lambda: wide.sum(0) / len(parts),
        "PREMUL_SUM": lambda: (wide * PREMUL_FACTOR).sum(0),
        "PRODUCT": lambda: wide.prod(0),
        "MIN": lambda: wide.amin(0),
        "MAX": lambda: wide.amax(0),
    }[redop]()
    return result.to(dtype)


REDUCTIONS = [
    (dtype, redop)
    for dtype in TYPES
    for redop in ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX")
    if dtype is not torch.bool or redop not in ("AVG", "PREMUL_SUM")
]


@pytest.mark.parametrize(("dtype", "redop"), REDUCTIONS, ids=str)
def test_reductions_are_exact(dtype: torch.dtype, redop: str) -> None:
    for size in SIZES:
        values = Pattern(dtype, size, redop)
        parts = [values.sent(rank, 1) for rank in range(size)]
        assert torch.equal(brute(redop, parts, dtype).double(), values.reduced(1).double()), size
        if redop in ("SUM", "PRODUCT") and dtype.is_floating_point:
            # One element at a time in the type itself, either way round: no partial result rounds.
            for order in (parts, parts[::-1]):
                total = order[0]
                for part in order[1:]:
                    combined = total.double() + part.double() if redop == "SUM" else total.double() * part.double()
                    total = combined.to(dtype)
                assert values.wrong(total, values.reduced(1)) == 0, size


@pytest.mark.parametrize("redop", ["BAND", "BOR", "BXOR"])
def test_bitwise(redop: str) -> None:
    values = Pattern(torch.uint8, 3, redop)
    a, b, c = (values.sent(rank) for rank in range(3))
    expected = {"BAND": a & b & c, "BOR": a | b | c, "BXOR": a ^ b ^ c}[redop]
    assert torch.equal(values.reduced(), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_ranks_and_blocks_differ(dtype: torch.dtype) -> None:
    values = Pattern(dtype, 4, None)
    for rank in range(4):
        assert values.wrong(values.sent(rank, 0), values.sent((rank + 1) % 4, 0)) > PERIOD // 4
        assert values.wrong(values.sent(rank, 0), values.sent(rank, 1)) > PERIOD // 4


@pytest.mark.parametrize("count", [0, 1, PERIOD - 1, PERIOD, 3 * PERIOD + 5, 1 << 16])
def test_every_wrong_element_is_counted(count: int) -> None:
    values = Pattern(torch.float32, 2, "SUM")
    tensor = torch.empty(count)
    poison(tensor)
    assert values.wrong(tensor, values.sent(1)) == count
    values.fill(tensor, 1)
    assert values.wrong(tensor, values.sent(1)) == 0
    if count:
        tensor[-1] = float("nan")
        assert values.wrong(tensor, values.sent(1)) == 1
    if count > 1:
        tensor[0] += 1
        assert values.wrong(tensor, values.sent(1)) == 2


def test_a_block_in_another_place_shows() -> None:
    values = Pattern(torch.bfloat16, 2, "SUM")
    tensor = torch.empty(1 << 18, dtype=torch.bfloat16)
    values.fill(tensor, 0)
    for offset in (1, 2, 1 << 10, 1 << 15, 1 << 17):
        assert values.wrong(tensor.roll(offset), values.sent(0)) > 0, offset


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_poison_is_no_expected_value(dtype: torch.dtype) -> None:
    for size in (2, 4):
        for redop in ("SUM", "MAX", None):
            values = Pattern(dtype, size, redop)
            tensor = torch.empty(PERIOD, dtype=dtype)
            poison(tensor)
            period = values.sent(0) if redop is None else values.reduced()
            assert values.wrong(tensor, period) > (PERIOD // 3 if dtype is torch.bool else PERIOD - 1)
