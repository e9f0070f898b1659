"""What a reduction gives, said as plainly as possible: in rank order, on one processor, with numpy's wide types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.differential.data import COMPLEX, INTEGERS, MOVED, NARROW, part, raw, reals, resolved

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def has(dtype: torch.dtype, reduction: str) -> bool:
    """Whether the dtype has the reduction: docs/parity.md's rule."""
    floating = dtype.is_floating_point or dtype.is_complex
    if dtype in MOVED:
        return False
    match reduction:
        case "SUM" | "PRODUCT":
            return True
        case "AVG":
            return dtype is not torch.bool
        case "MIN" | "MAX":
            return not dtype.is_complex
        case "BAND" | "BOR" | "BXOR":
            return not floating
        case _:
            return floating


@dataclass
class Expected:
    """A result: its exact bits, or bounds. Any NaN stands for any other."""

    values: Tensor
    bound: Any = None
    """None for exact bits; else how far each real component may be off, in the accumulator's numbers."""
    any_zero: bool = False
    """The sign of a zero depends on the order of operations."""

    def wrong(self, got: Tensor) -> int:
        """How many elements are wrong."""
        want = self.values
        if got.shape != want.shape or got.dtype != want.dtype:
            return max(got.numel(), 1)
        if self.bound is None:
            if torch.equal(raw(got), raw(want)):
                return 0
            if not (want.dtype.is_floating_point or want.dtype.is_complex):
                return int((raw(got) != raw(want)).sum())
            mine, theirs = components(got), components(want)
            same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
            if not self.any_zero:
                same &= np.isnan(mine) | (np.signbit(mine) == np.signbit(theirs))
            return int((~same).sum())
        return int((~(np.abs(components(got) - components(want)) <= self.bound)).sum())


def components(tensor: Tensor) -> Any:
    """Its real numbers, one after another, as float64."""
    return reals(resolved(tensor).contiguous()).reshape(-1).to(torch.float64).numpy()


def reduced(reduction: str, tensors: list[Tensor], factor: float = 1.0, rounding: bool = False) -> Expected:
    """The reduction of one tensor per rank, all of one shape."""
    first = tensors[0]
    dtype, shape, ranks = first.dtype, first.shape, len(tensors)
    if dtype is torch.bool:
        return Expected(_boolean(reduction, torch.stack(tensors)))
    if dtype in INTEGERS:
        with np.errstate(over="ignore"):
            result = _integer(reduction, [tensor.contiguous().numpy() for tensor in tensors])
        return Expected(torch.from_numpy(np.ascontiguousarray(result)).reshape(shape))
    with np.errstate(all="ignore"):
        return _floating(reduction, tensors, dtype, factor, rounding, ranks)


def _boolean(reduction: str, stack: Tensor) -> Tensor:
    match reduction:
        case "SUM" | "MAX" | "BOR":
            return stack.any(0)
        case "PRODUCT" | "MIN" | "BAND":
            return stack.all(0)
        case _:
            return stack.sum(0) % 2 == 1


def _integer(reduction: str, arrays: list[Any]) -> Any:
    match reduction:
        case "SUM":
            return fold(np.add, arrays)
        case "AVG":  # toward zero
            total = np.asarray(fold(np.add, arrays))
            ranks = np.asarray(len(arrays), dtype=total.dtype)
            return (total - np.fmod(total, ranks)) // ranks
        case "PRODUCT":
            return fold(np.multiply, arrays)
        case "MIN":
            return fold(np.minimum, arrays)
        case "MAX":
            return fold(np.maximum, arrays)
        case "BAND":
            return fold(np.bitwise_and, arrays)
        case "BOR":
            return fold(np.bitwise_or, arrays)
        case _:
            return fold(np.bitwise_xor, arrays)


def _floating(
    reduction: str, tensors: list[Tensor], dtype: torch.dtype, factor: float, rounding: bool, ranks: int
) -> Expected:
    shape, real = tensors[0].shape, part(dtype)
    arrays = [components(tensor) for tensor in tensors]
    # With rounding, the reference of float64 itself needs more bits than float64 has.
    wide: Any = np.longdouble if rounding and real is torch.float64 else np.float64
    arrays = [array.astype(wide) for array in arrays]
    unit = wide(2.0 ** (-53 if real is torch.float64 else -24))
    """Half a step of the accumulator, relative."""
    size: Any
    match reduction:
        case "SUM" | "AVG" | "PREMUL_SUM":
            total = fold(np.add, [array * wide(factor) for array in arrays])
            size = fold(np.add, [np.abs(array * wide(factor)) for array in arrays])
            if reduction == "AVG":
                narrow = np.float64 if real is torch.float64 else np.float32
                total = total / ranks if rounding else (total.astype(narrow) / narrow(ranks)).astype(wide)
                size = size / ranks
        case "PRODUCT" if dtype in COMPLEX:
            pairs = [array[0::2] + 1j * array[1::2] for array in arrays]
            product = fold(np.multiply, pairs)
            total = np.stack([product.real, product.imag], -1).reshape(-1)
            size = 4 * np.repeat(fold(np.multiply, [np.abs(pair) for pair in pairs]), 2)
        case "PRODUCT":
            total = fold(np.multiply, arrays)
            size = np.abs(total)
        case _:
            total = fold(_least if reduction == "MIN" else _most, arrays)
            size = np.zeros_like(total)
    result = torch.from_numpy(np.ascontiguousarray(np.atleast_1d(total).astype(np.float64))).to(real)
    if dtype.is_complex:
        result = torch.view_as_complex(result.reshape(-1, 2))
    result = result.reshape(shape)
    if not rounding:
        return Expected(result, any_zero=reduction == "PRODUCT" and dtype.is_complex)
    # n - 1 roundings of partial results, one of the factor's product, one of a division, one to the result's type: the
    # usual bound (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), twice, for the reference too.
    bound = 2 * (ranks + 2) * unit * size
    if dtype in NARROW:
        bound = bound + np.abs(total) * wide(torch.finfo(dtype).eps) + wide(torch.finfo(dtype).smallest_normal)
    return Expected(result, np.asarray(bound, dtype=np.float64))


def _least(a: Any, b: Any) -> Any:
    return np.where(np.isnan(a) | np.isnan(b), np.nan, np.where((a < b) | ((a == b) & np.signbit(a)), a, b))


def _most(a: Any, b: Any) -> Any:
    return np.where(np.isnan(a) | np.isnan(b), np.nan, np.where((a > b) | ((a == b) & ~np.signbit(a)), a, b))
