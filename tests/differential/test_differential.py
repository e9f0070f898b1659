"""Randomized cases against the reference. A failure names its seed, and the command that plays it again."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.differential.cases import draw
from tests.differential.worlds import RANKS, WORLDS, hold, memberships

SEED = int(os.environ.get("PODRING_TEST_SEED", secrets.randbelow(1 << 31)))
"""Another one each time, unless it is given."""
CASES = 700
"""In each world. Each is played by every member of its group, five ranks on average."""


@pytest.mark.parametrize("world", WORLDS)
def test_any_case(world: str) -> None:
    print(f"seed {SEED}")
    reports = hold(world, SEED, range(CASES))
    assert sum(report.played for report in reports) > 2 * CASES


def test_deterministic_results_do_not_depend_on_hosts() -> None:
    """Sums that round: PODRING_DETERMINISTIC=1 gives the same bits on one host, over each road, and on three."""
    print(f"seed {SEED}")
    sizes = [len(members) for members in memberships(SEED, RANKS)]
    rounding = [number for number in range(1500) if draw(SEED, number, sizes).mode == "rounding"][:60]
    assert len(rounding) == 60
    results = {}
    for world, options in WORLDS.items():
        env = {**options.get("env", {}), "PODRING_DETERMINISTIC": "1"}
        results[world] = [report.digests for report in hold(world, SEED, rounding, env=env)]
    assert results["staged"] == results["cma"]
    assert results["hosts"] == results["cma"]
