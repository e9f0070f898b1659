"""Writes what torch makes of float32 numbers in the 16- and 8-bit float types, and of 8-bit floats in float32.

    python make_narrow_floats.py

The files lie beside this script: `to_<dtype>.txt` has lines of a float32 and the rounded number, `from_<dtype>.txt` of
a number and its float32, all as hexadecimal bits. NaNs are in them as torch writes them.
"""

from pathlib import Path

import torch

HERE = Path(__file__).parent
INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
FLOATS = {
    torch.float16: [0x7C00, 0x7BFF, 0x03FF, 0x0400, 0x0001],
    torch.bfloat16: [0x7F80, 0x7F7F, 0x007F, 0x0080, 0x0001],
    torch.float8_e4m3fn: [],
    torch.float8_e5m2: [],
}


def bits(numbers: torch.Tensor) -> list[int]:
    return numbers.view(INTEGERS[numbers.element_size()]).tolist()


def float32(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(torch.uint32).view(torch.float32)


def inputs(dtype: torch.dtype, edges: list[int], generator: torch.Generator) -> torch.Tensor:
    """Numbers of the type, the midpoints between neighbours, one float32 step to each side of both; and random ones."""
    top = 1 << (8 * dtype.itemsize - 1)
    if top == 0x80:
        codes = torch.arange(0, top)
    else:
        codes = torch.cat([torch.tensor(edges), torch.randint(0, top, (250,), generator=generator)])
    pair = torch.stack([codes, (codes + 1) % top])
    low, high = pair.to(INTEGERS[dtype.itemsize]).view(dtype).double()
    exact = torch.cat([low, (low + high) / 2])
    finite = exact[exact.isfinite()].float()
    up = torch.nextafter(finite, torch.tensor(float("inf")))
    down = torch.nextafter(finite, torch.tensor(-float("inf")))
    any_bits = float32(torch.randint(0, 1 << 32, (200,), generator=generator).tolist())
    span = torch.finfo(dtype)
    low_exponent, high_exponent = torch.tensor(span.tiny).log2() - 12, torch.tensor(span.max).log2() + 1
    exponent = torch.rand(400, generator=generator) * (high_exponent - low_exponent) + low_exponent
    special = float32([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    positive = torch.cat([finite, up, down, exponent.exp2().float(), special])
    every = torch.cat([positive, -positive, any_bits])
    return float32(sorted(set(bits(every))))


def write(path: Path, left: torch.Tensor, right: torch.Tensor) -> None:
    rows = zip(bits(left), bits(right), strict=True)
    width, other = 2 * left.element_size(), 2 * right.element_size()
    path.write_text("".join(f"{a:0{width}x} {b:0{other}x}\n" for a, b in rows))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, edges in FLOATS.items():
        name = str(dtype).removeprefix("torch.")
        numbers = inputs(dtype, edges, generator)
        write(HERE / f"to_{name}.txt", numbers, numbers.to(dtype))
        if dtype.itemsize == 1:
            codes = torch.arange(0, 256).to(torch.uint8).view(dtype)
            write(HERE / f"from_{name}.txt", codes, codes.float())


if __name__ == "__main__":
    main()
