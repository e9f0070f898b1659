"""The inputs of `podring bench` and what every operation must make of them, exactly.

Inputs are small integers, so that every partial sum is exact in the element type and results compare bit for bit.
They repeat with a prime period: a block that lands in another place, or comes from another rank, shows.
"""

from __future__ import annotations

import functools

import torch

PERIOD = 4099
PREMUL_FACTOR = 0.5
_MODULI = (251, 127, 61, 31, 13, 7, 3, 2)


def _exact_limit(dtype: torch.dtype) -> int:
    """The largest n such that all integers 0..=n are exact in `dtype`."""
    if dtype is torch.bool:
        return 1
    if not dtype.is_floating_point:
        return int(torch.iinfo(dtype).max)
    # eps = 2^-(mantissa bits): integers are exact up to 2^(mantissa bits + 1).
    return int(2 / torch.finfo(dtype).eps)


class Pattern:
    """Values for ranks 0..size of one element type; `redop` names the reduction to be exact under, if any.

    Rank r's element j of block k is (j + j//256 + 11 r + 29 k) mod m, times what AVG and PREMUL_SUM will divide by.
    Where no m keeps the result exact (many ranks, narrow types), and for products, one rank in turn holds a value and
    the others the reduction's neutral element.
    """

    def __init__(self, dtype: torch.dtype, size: int, redop: str | None) -> None:
        self._dtype, self._size, self._redop = dtype, size, redop
        limit = _exact_limit(dtype)
        self._scale = {"AVG": size, "PREMUL_SUM": round(1 / PREMUL_FACTOR)}.get(redop or "", 1)
        terms = size * self._scale if redop in ("SUM", "AVG", "PREMUL_SUM") else 1
        fitting = [m for m in _MODULI if (m - 1) * terms <= limit]
        self._modulus = fitting[0] if fitting and redop != "PRODUCT" else None
        # Per instance, not on the class: a cache there would keep every instance's tables.
        self.sent = functools.cache(self._sent)
        self.reduced = functools.cache(self._reduced)

    def _integers(self, rank: int, block: int) -> torch.Tensor:
        j = torch.arange(PERIOD)
        j = j + (j >> 8)
        if self._modulus is not None:
            return (j + 11 * rank + 29 * block) % self._modulus * self._scale
        value, neutral = self._lone(block)
        return torch.where((j + block) % self._size == rank, value, neutral)

    def _lone(self, block: int) -> tuple[torch.Tensor, int]:
        """The value that one rank in turn holds, and what the others hold."""
        j = torch.arange(PERIOD) + 29 * block
        if self._dtype is torch.bool:
            return j % 2, int(self._redop == "PRODUCT")
        if self._redop == "PRODUCT":
            return 2 + j % 2, 1
        if self._redop == "AVG" and not self._dtype.is_floating_point:
            return _exact_limit(self._dtype) - j % 3, 0
        return (1 + j % 3) * (self._scale if self._redop == "PREMUL_SUM" else 1), 0

    def _sent(self, rank: int, block: int = 0) -> torch.Tensor:
        """What rank `rank` puts into block `block`: one period, in the element type."""
        return self._integers(rank, block).to(self._dtype)

    def _reduced(self, block: int = 0) -> torch.Tensor:
        """What the reduction makes of every rank's block `block`: one period, in the element type."""
        if self._modulus is None:
            total = self._lone(block)[0]
            # AVG here divides what n need not divide: integers truncate, floats round once.
            exact = total / self._scale if self._dtype.is_floating_point else total // self._scale
            return exact.to(self._dtype)
        parts = [self._integers(rank, block) for rank in range(self._size)]
        combine = {
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }.get(self._redop or "", torch.add)
        total = functools.reduce(combine, parts)
        return (total // self._scale).to(self._dtype)

    def fill(self, tensor: torch.Tensor, rank: int, block: int = 0) -> None:
        """Writes rank `rank`'s block `block` into the flat `tensor`."""
        period = self.sent(rank, block)
        whole = tensor.numel() // PERIOD * PERIOD
        tensor[:whole].view(-1, PERIOD).copy_(period.expand(whole // PERIOD, PERIOD))
        tensor[whole:].copy_(period[: tensor.numel() - whole])

    def wrong(self, tensor: torch.Tensor, period: torch.Tensor) -> int:
        """How many elements of the flat `tensor` differ, in any bit, from `period` repeated."""
        tensor, period = _bits(tensor), _bits(period)
        whole = tensor.numel() // PERIOD * PERIOD
        bad = torch.count_nonzero(tensor[:whole].view(-1, PERIOD) != period)
        bad += torch.count_nonzero(tensor[whole:] != period[: tensor.numel() - whole])
        return int(bad)


def poison(tensor: torch.Tensor) -> None:
    """Fills with bytes that are no expected value (for bool, which has only expected values: False)."""
    tensor.view(torch.uint8).fill_(0 if tensor.dtype is torch.bool else 0xFB)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer)
