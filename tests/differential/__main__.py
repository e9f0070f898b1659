"""Plays cases of the differential test: python -m tests.differential --world hosts --seed 7 --case 123"""

from __future__ import annotations

import argparse
import secrets

from tests.differential.cases import draw
from tests.differential.worlds import RANKS, WORLDS, hold, memberships


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--world", choices=WORLDS, help="default: all, one after another")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="default: a new one")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--cases", type=int, default=1000, help="that many, from number 0")
    given = parser.parse_args()
    numbers = [given.case] if given.case is not None else range(given.cases)
    for world in [given.world] if given.world else WORLDS:
        print(f"{world}: seed {given.seed}", flush=True)
        members = memberships(given.seed, RANKS)
        if given.case is not None:
            case = draw(given.seed, given.case, [len(group) for group in members])
            print(f"case {given.case}: {case}; members {members[case.group]}", flush=True)
        reports = hold(world, given.seed, numbers, timeout=600)
        played, seconds = sum(report.played for report in reports), max(report.seconds for report in reports)
        print(f"{world}: {len(numbers)} cases right, played {played} times on ranks, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
