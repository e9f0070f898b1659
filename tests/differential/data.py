"""Tensors for the differential test: random bytes or numbers, in memory of any layout, all around them guarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
WIDE = (torch.float32, torch.float64)
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32)
"""Kinds that have no arithmetic: they are carried only."""
REDUCED = (*INTEGERS, torch.bool, *WIDE, *NARROW, *COMPLEX)
DTYPES = (*REDUCED, *MOVED)

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A type of each size whose copies are copies of bytes, to see others through."""
GUARD = 0xA5
"""The byte of all memory that no collective may touch."""

MANTISSA = {
    torch.float64: 50,
    torch.float32: 20,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}
"""Bits of the whole numbers that exact values are made of: the dtype has them, and its accumulator the sum of 8."""
EXPONENTS = {
    torch.float64: (-1074, -60, 0, 200),
    torch.float32: (-149, -30, 0, 60),
    torch.float16: (-24, -8, 2),
    torch.bfloat16: (-133, -20, 0, 60),
    torch.float8_e4m3fn: (-9, -3, 3),
    torch.float8_e5m2: (-16, -3, 10),
}
"""Powers of two that scale them: from subnormal numbers to, for the narrow kinds, sums that overflow."""


def part(dtype: torch.dtype) -> torch.dtype:
    """The real type that a complex type is made of; others are themselves."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def count_of(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return int(np.prod(shape, dtype=np.int64))


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def any_bytes(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs with payloads too; of bool, both."""
    raw = rng.integers(0, 256, count_of(shape) * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    return (
        torch.from_numpy(raw).view(dtype).reshape(tuple(shape)) if len(raw) else torch.empty(tuple(shape), dtype=dtype)
    )


def numbers(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype, mode: str, exponent: int) -> Tensor:
    """Numbers to reduce.

    "exact": whatever order they are added in, the sum of eight is exact in the dtype's accumulator. Integers and bool
    are of the full range. "factors": the same for products. "special": NaN, infinities, zeros of both signs, subnormal
    numbers; sums of these too are the same in any order. "rounding": normally distributed.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return any_bytes(rng, shape, dtype)
    real = part(dtype)
    many = count_of(shape) * (2 if dtype.is_complex else 1)
    match mode:
        case "exact":
            most = 1 << MANTISSA[real]
            values = np.ldexp(rng.integers(-most, most, many, endpoint=True).astype(np.float64), exponent)
        case "factors" if dtype.is_complex:
            values = rng.choice(np.array([-1.0, 0.0, 1.0]), many)
        case "factors":
            values = rng.choice(np.array([1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 3.0]), many)
        case "special":
            tiny = float(np.ldexp(1.0, EXPONENTS[real][0]))
            always = [np.nan, np.inf, -np.inf, 0.0, -0.0]
            usual = rng.choice(np.array([*always, 1.0, -1.0, 1.5]), many)
            subnormal = rng.choice(np.array([*always, tiny, -tiny, 3 * tiny]), many)
            # Never both in one place: 1 - 1 + tiny is tiny, but 1 + tiny - 1 is 0.
            values = np.where(np.arange(many) // 2 % 2 == 0, usual, subnormal)
        case "rounding":
            values = rng.standard_normal(many)
        case _:
            raise ValueError(mode)
    tensor = torch.from_numpy(values).to(real)
    if dtype.is_complex:
        tensor = torch.view_as_complex(tensor.reshape(-1, 2))
    return tensor.reshape(tuple(shape))


def reals(tensor: Tensor) -> Tensor:
    """A complex tensor's real numbers, pairs in a last dimension; a real tensor itself. A view that keeps the lazy
    negation: torch negates real numbers by their sign, but long runs of complex ones as 0 - x, which makes of 0 a 0."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype in COMPLEX else tensor


def resolved(tensor: Tensor) -> Tensor:
    """The tensor, lazy conjugation and negation done to the bit."""
    if tensor.is_neg() and tensor.dtype in COMPLEX:
        return torch.view_as_complex(reals(tensor).resolve_neg())
    return tensor.resolve_conj().resolve_neg()


def negative(tensor: Tensor) -> Tensor:
    """Its negative, to the bit."""
    return torch.view_as_complex(reals(tensor).neg()) if tensor.dtype in COMPLEX else tensor.neg()


def raw(tensor: Tensor) -> Tensor:
    """The elements' bytes in logical order, lazy conjugation and negation done."""
    flat = resolved(tensor).contiguous()
    # One element may have any stride and still be called contiguous.
    return flat.as_strided((flat.numel(),), (1,), flat.storage_offset()).view(torch.uint8)


@dataclass
class Placed:
    """A tensor amid guarded memory."""

    tensor: Tensor
    base: Tensor
    """All the memory, as bytes' carriers."""
    inside: Tensor
    """The same elements as `tensor`, as carriers: no lazy bits."""
    before: Tensor

    def around_untouched(self) -> bool:
        """Is all memory but the tensor's own as it was?"""
        if self.base.numel() == self.inside.numel():
            return True
        now = self.base.clone()
        now.as_strided(self.inside.size(), self.inside.stride(), self.inside.storage_offset()).zero_()
        then = self.before
        then.as_strided(self.inside.size(), self.inside.stride(), self.inside.storage_offset()).zero_()
        return torch.equal(now.view(torch.uint8), then.view(torch.uint8))

    def untouched(self) -> bool:
        """Is all of it as it was?"""
        return torch.equal(self.base.view(torch.uint8), self.before.view(torch.uint8))


LAYOUTS = ("plain", "plain", "offset", "strided", "strided", "expanded", "conj", "neg")
NEGATABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *COMPLEX)


def place(values: Tensor, layout: str, random: Random, output: bool = False) -> Placed:
    """`values` in memory of that layout. "strided": any order of dimensions, any steps and gaps. "expanded": one row as
    often as dimension 0 has it. What a dtype, an output or the values can't have is plain instead."""
    dtype = values.dtype
    sizes = list(values.shape)
    strides = [0] * len(sizes)
    offset = 0 if layout == "plain" else random.randrange(4)
    order = list(range(len(sizes)))
    scattered = layout == "strided" or (layout in ("conj", "neg") and random.random() < 0.5)
    if scattered:
        random.shuffle(order)
    reach = random.choice((1, 2, 3)) if scattered else 1
    expand = layout == "expanded" and not output and bool(sizes) and sizes[0] > 1 and values.numel() > 0
    expand = expand and torch.equal(raw(values), raw(values[:1].expand(sizes)))
    for dim in reversed(order):
        if expand and dim == 0:
            continue
        strides[dim] = reach
        reach = reach * max(sizes[dim], 1) + (random.choice((0, 0, 1, 5)) if scattered else 0)
    carrier = CARRIERS[dtype.itemsize]
    size = offset + (reach if values.numel() else 0) + random.randrange(3 if layout != "plain" else 1)
    base = torch.full((size * dtype.itemsize,), GUARD, dtype=torch.uint8).view(carrier)
    inside = base.as_strided(sizes, strides, offset)
    lazy = "conj" if layout == "conj" and dtype.is_complex else "neg" if layout == "neg" else ""
    if lazy == "neg" and dtype not in NEGATABLE:
        lazy = ""
    stored = torch.conj_physical(values) if lazy == "conj" else negative(values) if lazy == "neg" else values
    if values.numel():
        source = raw(stored).view(carrier).reshape(sizes)
        if expand:
            inside[0].copy_(source[0])
        else:
            inside.copy_(source)
    tensor = inside.view(dtype)
    if lazy == "conj":
        tensor = tensor.conj()
    elif lazy == "neg":
        tensor = torch._neg_view(tensor)
    return Placed(tensor, base, inside, base.clone())
