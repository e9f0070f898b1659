"""A set of worker processes that play many cases over many groups."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch.distributed as dist

from tests.differential.cases import Group, Played, Player, draw
from tests.harness import run

RANKS = 8
WINDOW = 6
"""Asynchronous cases under way at once, at most."""

WORLDS: dict[str, dict[str, Any]] = {
    "cma": {},
    "staged": {"env": {"PODRING_CMA": "0"}},
    "hosts": {"rank_env": lambda rank: {"PODRING_HOST_ID": "abcabbca"[rank % RANKS]}},
}
"""How bytes travel: read from the peer's memory; through shared memory; also over TCP, between three hosts."""


def memberships(seed: int, ranks: int) -> list[list[int]]:
    """The members of each group: everybody, twice; subsets of every size; some pairs of subsets that share nobody."""
    random = Random(f"{seed}:groups")
    everybody = list(range(ranks))
    groups = [everybody, everybody]
    for size in range(2, ranks):
        groups.append(sorted(random.sample(everybody, size)))
    for _ in range(4):
        cut = random.randrange(2, ranks - 1) if ranks > 3 else ranks
        shuffled = random.sample(everybody, ranks)
        groups += [sorted(part) for part in (shuffled[:cut], shuffled[cut:]) if len(part) > 1]
    return groups


SPLITS = 4
"""The last groups of memberships() that are made by split_group rather than new_group."""


def make_groups(memberships: list[list[int]]) -> list[Group | None]:
    """One per membership; None where this rank is no member."""
    me = dist.get_rank()
    groups: list[Group | None] = []
    for number, members in enumerate(memberships):
        handle: Any
        if number == 0:
            handle = dist.group.WORLD
        elif number >= len(memberships) - SPLITS:
            others = [rank for rank in range(dist.get_world_size()) if rank not in members]
            handle = dist.split_group(split_ranks=[members, others] if others else [members])
        else:
            handle = dist.new_group(members)
        groups.append(Group(handle, members.index(me), len(members)) if me in members else None)
    return groups


@dataclass
class Report:
    """What one rank has to say."""

    rank: int
    played: int = 0
    wrong: list[str] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """Of each case's results on this rank."""
    shared: set[int] = field(default_factory=set)
    """Cases whose results are the same on all members."""
    seconds: float = 0.0


def play(seed: int, numbers: Sequence[int], stop_after: int = 20) -> Report:
    """Plays these cases of a seed on this rank."""
    members = memberships(seed, dist.get_world_size())
    sizes = [len(group) for group in members]
    groups = make_groups(members)
    report = Report(dist.get_rank())
    window: list[Played] = []
    started = time.monotonic()

    def finish(played: Played) -> None:
        complaints, digest = played.finish()
        report.played += 1
        report.digests[played.case.number] = digest
        if played.same_everywhere:
            report.shared.add(played.case.number)
        report.wrong += [f"case {played.case.number}: {played.case}: {complaint}" for complaint in complaints]

    for number in numbers:
        case = draw(seed, number, sizes)
        group = groups[case.group]
        if group is None:
            continue
        try:
            played = Player(case, group).play()
            if case.is_async:
                window.append(played)
                while len(window) > WINDOW:
                    finish(window.pop(0))
            else:
                finish(played)
        except Exception:
            report.wrong.append(f"case {number}: {case}: raised\n{traceback.format_exc()}")
            return report
        if len(report.wrong) >= stop_after:
            break
    try:
        for played in window:
            finish(played)
        dist.barrier()
    except Exception:
        report.wrong.append(f"at the end: {traceback.format_exc()}")
    report.seconds = time.monotonic() - started
    return report


def hold(world: str, seed: int, numbers: Sequence[int], timeout: float = 120.0, **options: Any) -> list[Report]:
    """Plays the cases in that world. An AssertionError says which are wrong, and how to play the first again."""
    options = {**WORLDS[world], **options}
    reports: list[Report] = run(play, RANKS, seed, numbers, timeout=timeout, op_timeout=20.0, **options)
    judge(reports, f"python -m tests.differential --world {world} --seed {seed}", len(numbers))
    return reports


def judge(reports: Sequence[Report], again: str, cases: int | None = None) -> None:
    """An AssertionError unless every case was right, with the same bits on all ranks where they share a result."""
    wrong = [f"[rank {report.rank}] {text}" for report in reports for text in report.wrong]
    for number in sorted(set.union(*(report.shared for report in reports))):
        digests = {report.rank: report.digests[number] for report in reports if number in report.digests}
        if len(set(digests.values())) > 1:
            wrong.append(f"case {number}: ranks hold different bits: {digests}")
    if wrong:
        wrong.sort(key=lambda text: "lost rank" in text)  # first what is not a consequence
        how = again if cases is None else f"{again} --cases {cases}, or one: {again} --case N"
        raise AssertionError(f"{len(wrong)} wrong; again: {how}\n" + "\n".join(wrong[:20]))
