"""Writes docs/parity.md: what podring and gloo do, by running both. python -m tests.parity [--check]"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.differential.data import DTYPES
from tests.differential.reference import REDUCTIONS
from tests.harness import attempt
from tests.parity.cells import LAYOUTS, MOVING, REDUCING, UNEVEN, Cell, play

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
BACKENDS = ("tpu", "gloo")
RANKS = 3
LIMIT, SHORT = 1.5, 8.0
"""Seconds: the timeout of a cell's group, and how long a cell may take by itself before it counts as a hang."""

WHOLE = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Operations on a tensor of all blocks, which has at least one dimension."""

TORCH_TPU = {
    "reduce": "not there",
    "recv from any": "not there",
    "PREMUL_SUM": "refused",
    "uneven blocks of all_gather, reduce_scatter": "refused",
    "uneven blocks of all_to_all_single": "recompiles for each split",
    "broadcast, scatter, gather": "emulated, at N times the cost",
    "several point-to-point messages of one tag": "race",
    "coalescing": "not there",
    "subset and unequal groups": "hang or impossible",
    "monitored barrier": "not there",
    "split_group": "not there",
    "timeouts": "dropped",
    "abort": "does nothing",
}
"""TorchTPU 0.2.0's ProcessGroupTpu, as its source reads. Nobody ran it."""


def judge(backend: str, cells: Sequence[Cell]) -> list[str]:
    """What becomes of each cell: ranks' common answer, or the worst."""

    def body() -> list[str]:
        return [play(cell, LIMIT) for cell in cells]

    ends = attempt(body, RANKS, backend=backend, timeout=SHORT if len(cells) == 1 else 60.0)
    if all(end.returned for end in ends):
        return [worst([end.value[index] for end in ends]) for index in range(len(cells))]
    if len(cells) == 1:
        died = [end for end in ends if end.exit_code < 0 and not end.killed]
        return ["crash" if died else "hang"]
    middle = len(cells) // 2
    return judge(backend, cells[:middle]) + judge(backend, cells[middle:])


def worst(answers: list[str]) -> str:
    """One for all ranks: wrong data before an error before "ok"."""
    if "wrong" in answers:
        return "wrong"
    errors = [answer for answer in answers if answer != "ok"]
    if not errors:
        return "ok"
    return errors[0] if len(errors) == len(answers) else f"{errors[0]} (not on every rank)"


class Notes:
    """Errors, numbered in the order they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, answer: str, cell: Cell) -> str:
        if answer in ("ok", "wrong", "crash", "hang"):
            return answer if answer == "ok" else f"**{answer}**"
        plain = re.sub(r"[^ -~]+", " ", answer)
        plain = re.sub(r"rank \d+( of \d+)?", "rank R", plain)
        plain = re.sub(r"\b(u?int|float|bfloat|complex|bool)[0-9a-z_]*\b", "DTYPE", plain)
        plain = re.sub(r"\b(SUM|AVG|PRODUCT|MIN|MAX|BAND|BOR|BXOR|PREMUL_SUM)\b(\([^)]*\))?", "OP", plain)
        plain = plain.replace(cell.op, "CALL").replace("|", "/")
        plain = re.sub(r"\d+", "N", plain)[:150]
        return f"e{self.numbers.setdefault(plain, len(self.numbers) + 1)}"


def table(
    head: Sequence[str], rows: Sequence[str], cell_of: Callable[[str, str], Cell | None], notes: Notes, corner: str
) -> list[str]:
    """podring's answer, then gloo's, in each field; a dash where `cell_of` has none."""
    fields_of = {(row, column): cell_of(row, column) for row in rows for column in head}
    cells = [cell for cell in fields_of.values() if cell is not None]
    answers = {backend: dict(zip(cells, judge(backend, cells), strict=True)) for backend in BACKENDS}
    lines = [f"| {corner} | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for row in rows:
        fields = []
        for column in head:
            cell = fields_of[row, column]
            fields.append(" · ".join(notes.mark(answers[backend][cell], cell) for backend in BACKENDS) if cell else "—")
        lines.append(f"| {row} | " + " | ".join(fields) + " |")
    return lines


def write() -> str:
    """The page."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    notes = Notes()
    lines = [
        "# Parity: podring beside gloo and TorchTPU",
        "",
        "Made by `python -m tests.parity`, which runs every field on both backends, "
        f"{RANKS} ranks, torch {torch.__version__.split('+')[0]}, and compares with a plain reference. "
        "Don't edit: `--check` says whether it still holds.",
        "",
        "In each field: podring's answer, then gloo's. *ok*: the reference's bits. **wrong**: no error, other data. "
        "eN: an error, see the end. Calls are those of `torch.distributed`; some errors are its own, for any backend.",
        "",
        "AVG of integers sums in the tensor's own type, where sums wrap, and divides that: as NCCL's does.",
    ]
    for op in REDUCING[:2] + REDUCING[3:]:

        def reducing(row: str, column: str, op: str = op) -> Cell:
            return Cell(op, names[row], column)

        lines += ["", f"## {op}: dtype × reduction", ""]
        lines += table(REDUCTIONS, list(names), reducing, notes, "dtype")
    lines += ["", "## Operations that move: dtype × operation", ""]
    lines += table(MOVING, list(names), lambda row, column: Cell(column, names[row]), notes, "dtype")
    lines += ["", "## Layout × operation, float32, SUM", ""]

    def laid(row: str, column: str) -> Cell | None:
        if (row == "uneven blocks" and column not in UNEVEN) or (row == "0-dim" and column in WHOLE):
            return None
        return Cell(column, reduction="SUM" if column in REDUCING else "", layout=row)

    lines += table([*REDUCING, *MOVING], LAYOUTS, laid, notes, "layout")
    lines += [
        "",
        "An expanded output has one element of memory for many: it can't hold a result, an error is right.",
        "",
    ]
    lines += [
        "torch's dispatcher gives a backend a copy of a lazily negated (or conjugated) output; podring's groups get"
    ]
    lines += ["the view itself.", ""]
    lines += ["## TorchTPU 0.2.0: from its source, not run", "", "| what | TorchTPU |", "|---|---|"]
    lines += [f"| {what} | {how} |" for what, how in TORCH_TPU.items()]
    lines += ["", "## Errors", "", "Numbers, dtypes, reductions and the call's name are left out.", ""]
    lines += [f"- e{number}: `{text}`" for text, number in notes.numbers.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page says something else")
    given = parser.parse_args()
    assert dist.is_available()
    page = write()
    if given.check:
        old = PAGE.read_text().splitlines()
        changes = list(difflib.unified_diff(old, page.splitlines(), "docs/parity.md", "now", lineterm="", n=0))
        print("\n".join(changes) or "docs/parity.md holds")
        return bool(changes)
    PAGE.write_text(page)
    print(f"{PAGE}: {page.count(' ok ')} fields ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
