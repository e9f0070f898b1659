"""How a world forms through the coordinator, and what its ranks hear of each other there."""

from __future__ import annotations

import functools
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import End, attempt, report, run
from tests.rendezvous import servers
from tests.rendezvous.coordinator import Coordinator, coordinator

QUICK = {"PODRING_SILENCE_MS": "1000"}
ALONE: harness.RankEnv = lambda rank: {"PODRING_HOST_ID": f"host{rank}"}  # noqa: E731
"""Every rank on a host of its own."""
PAIRS: harness.RankEnv = lambda rank: {"PODRING_HOST_ID": f"host{rank // 2}"}  # noqa: E731
"""Two ranks on a host."""
ONE: harness.RankEnv = lambda rank: {}  # noqa: E731
"""All ranks on this host."""
LAYOUTS = {"one host": ONE, "two hosts": PAIRS, "four hosts": ALONE}
SOON = 5.0


def total() -> float:
    """A sum over all ranks."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return tensor[-1].item()


def total_of_subset() -> float:
    """The same over ranks 1 and 3, by a group that they alone make; the others' is over all."""
    if dist.get_rank() % 2 == 0:
        return 2.0
    group = harness.new_group([1, 3], use_local_synchronization=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def both() -> tuple[float, float]:
    return total(), total_of_subset()


@pytest.mark.parametrize("road", ["coordinator", "store"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_world_forms(road: str, layout: str) -> None:
    env = {"PODRING_RENDEZVOUS": road}
    assert run(both, 4, env=env, rank_env=LAYOUTS[layout]) == [(4.0, 2.0)] * 4


def test_ranks_of_a_host_share_one_connection() -> None:
    """Two hosts, three ranks each, world after world."""
    hosts: harness.RankEnv = lambda rank: {"PODRING_HOST_ID": f"host{rank // 3}"}  # noqa: E731
    with coordinator() as standing:

        def body() -> list[float]:
            values = []
            for turn in range(2):
                join(suffix=str(turn))
                values.append(total())
                dist.barrier()
                if dist.get_rank() == 0:
                    # The agents of the world before may be leaving still.
                    values.append(float(settled(standing.connections, 2)))
                dist.barrier()
                dist.destroy_process_group()
            return values

        env = {"PODRING_COORDINATOR": standing.address}
        values = run(body, 6, init=False, env=env, rank_env=hosts)
        assert values == [[6.0, 2.0, 6.0, 2.0]] + [[6.0, 6.0]] * 5


def settled(value: Callable[[], int], wanted: int, seconds: float = 10.0) -> int:
    """The value once it is the wanted one, or after so long."""
    until = time.monotonic() + seconds
    while (now := value()) != wanted and time.monotonic() < until:
        time.sleep(0.01)
    return now


def join(seconds: float = 20.0, suffix: str = "") -> None:
    """Joins the job over the harness's store file."""
    dist.init_process_group(
        harness.BACKEND,
        init_method=f"file://{os.environ['STORE_FILE']}{suffix}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=seconds),
    )


def killed(victim: int, rank_env: harness.RankEnv, how: int = signal.SIGKILL, ranks: int = 4) -> list[End]:
    """The victim dies without a word, before there is a link to anybody. A while later the others need it."""

    def body() -> float:
        # The others know by then that the world has formed.
        time.sleep(0.5)
        if dist.get_rank() == victim:
            os.kill(os.getpid(), how)
            time.sleep(30)
        # Longer than the silence.
        time.sleep(2.5 if how == signal.SIGSTOP else 1.0)
        return total()

    stays = victim if how == signal.SIGSTOP else None
    timeout = 20 if stays is None else 9
    ends = attempt(body, ranks, op_timeout=30, timeout=timeout, env=QUICK, rank_env=rank_env, stays=stays)
    return [end for end in ends if end.rank != victim]


@pytest.mark.parametrize("victim", range(4))
def test_death_is_told_by_name(victim: int) -> None:
    """Of a rank, an agent's rank, rank 0 with the coordinator; in every layout."""
    jobs = {layout: functools.partial(killed, victim, rank_env) for layout, rank_env in LAYOUTS.items()}
    for layout, ends in servers.side_by_side(jobs).items():
        assert len(ends) == 3
        for end in ends:
            assert end.error is not None and end.error.is_a("DistBackendError"), layout + report(ends)
            named = rf"lost rank {victim} on host \S+: \S+"
            assert re.search(named, end.error.message), layout + report(ends)
            assert end.seconds < SOON, layout + report(ends)


@pytest.fixture(scope="module")
def long() -> Iterator[servers.Jobs]:
    """Jobs that mostly wait, all at once."""
    with servers.jobs(
        {
            "silence, a host of its own": lambda: killed(2, ALONE, signal.SIGSTOP),
            "silence, rank 0's host": lambda: killed(2, ONE, signal.SIGSTOP),
            "silence, another host": lambda: killed(3, PAIRS, signal.SIGSTOP),
            "forked child, one host": lambda: killed_with_a_child(ONE),
            "forked child, hosts of their own": lambda: killed_with_a_child(ALONE),
            "restart": coordinator_killed_and_restarted,
            "gone": coordinator_gone,
        }
    ) as made:
        yield made


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("a host of its own", r"lost rank 2 on host host2\b"),
        ("rank 0's host", r"lost rank 2 on host \S+: silent"),
        ("another host", r"lost rank 3 on host host1\b"),
    ],
)
def test_silence_is_told_by_name(where: str, named: str, long: servers.Jobs) -> None:
    """A rank that is stopped, with no link to anybody, and shares its host with others or doesn't."""
    ends = long.ended(f"silence, {where}")
    assert len(ends) == 3
    for end in ends:
        assert end.error is not None and end.error.is_a("DistBackendError"), report(ends)
        assert re.search(named, end.error.message) and "silent" in end.error.message, report(ends)
        assert end.seconds < SOON + 2, report(ends)


def killed_with_a_child(layout: harness.RankEnv) -> list[End]:
    def body() -> float:
        if dist.get_rank() == 1:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        return total()

    ends = attempt(body, 3, op_timeout=30, timeout=20, env=QUICK, rank_env=layout)
    return [end for end in ends if end.rank != 1]


@pytest.mark.parametrize("layout", ["one host", "hosts of their own"])
def test_death_of_a_rank_with_a_forked_child(layout: str, long: servers.Jobs) -> None:
    """The child holds none of the rank's connections."""
    ends = long.ended(f"forked child, {layout}")
    for end in ends:
        assert end.error is not None and "lost rank 1" in end.error.message, report(ends)
        assert end.seconds < SOON, report(ends)


@pytest.mark.parametrize("layout", ["one host", "two hosts"])
def test_ranks_may_leave_one_after_another(layout: str) -> None:
    """In order, rank 0 and the agents first: those who stay go on with each other."""

    def body() -> float:
        value = total()
        group = harness.new_group([1, 3], use_local_synchronization=True) if dist.get_rank() in (1, 3) else None
        if group is not None:
            time.sleep(1)
            tensor = torch.ones(2)
            for _ in range(20):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
            value += tensor[0].item()
        dist.destroy_process_group()
        return value

    assert run(body, 4, rank_env=LAYOUTS[layout], env=QUICK) == [4.0, 5.0, 4.0, 5.0]


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def coordinator_killed_and_restarted() -> tuple[list[End], int]:
    """The ends, and how many connections the second coordinator had when the hosts were back."""
    with coordinator() as first, tempfile.TemporaryDirectory() as directory:
        restarted: list[Coordinator] = []
        back = Path(directory) / "back"

        def restart() -> None:
            until(lambda: first.connections() == 2)
            time.sleep(0.5)
            first.kill()
            time.sleep(0.5)
            restarted.append(Coordinator(bind=first.address))
            until(lambda: restarted[0].connections() == 2)
            # They announce themselves.
            time.sleep(0.5)
            back.touch()

        def body() -> tuple[float, str]:
            # What all have seen by the same call: nobody goes in once more alone.
            seen = torch.zeros(2)
            while seen[1] < dist.get_world_size():
                seen = torch.tensor([1.0, float(back.exists())])
                dist.all_reduce(seen)
                time.sleep(0.05)
            value = seen[0].item()
            if dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1)
            with pytest.raises(RuntimeError) as caught:
                total()
            return value, str(caught.value)

        thread = threading.Thread(target=restart)
        thread.start()
        env = {**QUICK, "PODRING_COORDINATOR": first.address}
        ends = attempt(body, 4, op_timeout=20, timeout=30, env=env, rank_env=PAIRS)
        thread.join()
        connections = restarted[0].connections()
        restarted[0].close()
        return ends, connections


def test_coordinator_is_killed_and_comes_back(long: servers.Jobs) -> None:
    """The job goes on meanwhile; afterwards a death is told again."""
    ends, connections = long.ended("restart")
    assert connections <= 2
    for end in ends:
        if end.rank != 2:
            assert end.returned, report(ends)
            assert end.value[0] == 4.0 and "lost rank 2" in end.value[1], end.value


def coordinator_gone() -> list[float]:
    with coordinator() as standing:

        def body() -> float:
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(standing.pid, signal.SIGKILL)
            time.sleep(2.5)
            return total()

        env = {**QUICK, "PODRING_COORDINATOR": standing.address}
        return run(body, 3, env=env, rank_env=ALONE)


def test_coordinator_that_stays_away_ends_nothing(long: servers.Jobs) -> None:
    assert long.ended("gone") == [3.0] * 3


def resources() -> tuple[int, list[str], int]:
    """Descriptors, threads by name, resident memory in KiB. The callback pool's threads come and go."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    threads = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    threads = [name for name in threads if name != "podring-callbac"]
    return len(os.listdir("/proc/self/fd")), threads, int(status["VmRSS"].split()[0])


def test_a_thousand_groups_leave_nothing_behind() -> None:
    def body() -> list[tuple[int, list[str], int]]:
        def cycle(count: int) -> None:
            for _ in range(count):
                group = dist.new_group([0, 1])
                dist.destroy_process_group(group)

        dist.all_reduce(torch.ones(1))
        cycle(200)
        dist.barrier()
        before = resources()
        cycle(1000)
        dist.barrier()
        return [before, resources()]

    for before, after in run(body, 2):
        assert after[0] <= before[0], (before, after)
        assert len(after[1]) <= len(before[1]), (before, after)
        # Python's and torch's own bookkeeping, which gloo pays too, is within this; a group's channel alone is more
        # than 1 KiB.
        assert after[2] - before[2] < 2048, (before, after)
