"""Several hosts, each a network namespace with two ranks: between them there is nothing but the network."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.differential.test_differential import SEED
from tests.differential.worlds import Report, judge, play
from tests.harness import BACKEND, End, report, run
from tests.multihost.netns import DEAD, IPV4, LIVE, RANKS, SETUPS, Hosts, hosts, ip, sent
from tests.parallel.model import Net, alone, same, sgd, state, train
from tests.parallel.test_fsdp import grid, sharded

pytestmark = pytest.mark.skipif(BACKEND != "tpu", reason="what podring promises between hosts")

CASES = 500
"""Of the differential test, on each set-up."""
SILENCE = 1.0
"""Seconds, where a test waits for it."""
SLACK = 2.0
"""Seconds more, for a machine that has other things to do."""


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    """Two hosts with IPv4."""
    with hosts(2, (IPV4,)) as made:
        yield made


@pytest.fixture(scope="module")
def half_dead() -> Iterator[Hosts]:
    """Two hosts with two interfaces, of which the first one loses everything."""
    with hosts(2, (DEAD, IPV4)) as made:
        yield made


def step() -> str:
    """A few steps of FSDP2, held against one process; the parameters' digest."""
    net = sharded(Net(), grid(dist.get_world_size()))
    train(net, sgd(net.parameters()), dist.get_rank(), dist.get_world_size())
    got = state(net)
    same(got, alone())
    digest = hashlib.sha256()
    for name, tensor in sorted(got.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


EXACT = {"PODRING_DETERMINISTIC": "1"}
"""The same bits wherever the ranks are."""


def work(seed: int) -> tuple[float, Report, str, int]:
    """The first collective's seconds, then many cases, then training; and how many bytes that sent to other hosts."""
    begin = time.monotonic()
    dist.all_reduce(torch.ones(1000))
    first = time.monotonic() - begin
    before = sent(LIVE)
    played = play(seed, range(CASES))
    return first, played, step(), sent(LIVE) - before


@pytest.mark.parametrize(("count", "setup"), [(2, "IPv4"), (2, "IPv6"), (2, "two NICs, one dead"), (3, "IPv4")])
def test_hosts(count: int, setup: str) -> None:
    """Random cases against the reference, and training with the same numbers as on one host."""
    print(f"seed {SEED}")
    with hosts(count, SETUPS[setup]) as made:
        results = made.run(work, SEED, env=EXACT)
    judge([played for _, played, _, _ in results], f"PODRING_TEST_SEED={SEED} pytest {__file__} -k 'test_hosts'")
    assert set(run(step, made.ranks, env=EXACT)) == {digest for _, _, digest, _ in results}
    # A dead address costs no timeout, and what isn't for this host has gone through the network.
    assert max(first for first, _, _, _ in results) < 5, [first for first, _, _, _ in results]
    assert min(count for _, _, _, count in results) > 1 << 20, [count for _, _, _, count in results]


def total() -> tuple[float, int]:
    """A sum over all ranks that is long enough to be read from the peer's memory; bytes sent to other hosts."""
    before = sent(LIVE)
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor[-1].item(), sent(LIVE) - before


@pytest.mark.parametrize("identity", ["", "the same"], ids=["none", "one for all"])
def test_namespaces_are_hosts_whatever_they_say(two: Hosts, identity: str) -> None:
    """The ranks share a kernel, and could read each other's memory: but no socket that proves it spans namespaces."""
    for value, count in two.run(total, env={"PODRING_HOST_ID": identity}):
        assert value == two.ranks
        assert count > 1 << 20


LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of a namespace: where the ports are from that connections leave by."""


def test_who_calls_before_the_coordinator_listens_does_not_call_itself() -> None:
    """Where hardly another port than the coordinator's is left to call from, a rank would soon be given that one, take
    itself for a stranger, and keep the coordinator off its port."""

    def body() -> tuple[float, int]:
        rank = int(os.environ["RANK"])
        made.enter(0)
        LOCAL_PORTS.write_text("40000 40007")
        if rank == 0:
            time.sleep(2)
        url = f"tpu://127.0.0.1:40002?rank={rank}&world_size={RANKS}"
        dist.init_process_group(BACKEND, init_method=url, timeout=timedelta(seconds=20))
        got = total()
        dist.destroy_process_group()
        return got

    with hosts(1, (IPV4,)) as made:
        assert run(body, RANKS, init=False) == [(RANKS, 0)] * RANKS


def test_token(two: Hosts, tmp_path: Path) -> None:
    """With PODRING_TOKEN_FILE; and with another one on each host, which every rank is told."""

    def token(host: int) -> dict[str, str]:
        path = tmp_path / f"token{host}"
        path.write_text(f"a token for host {host}".replace(" ", "-"))
        return {"PODRING_TOKEN_FILE": str(path)}

    assert {value for value, _ in two.run(total, env=token(0))} == {two.ranks}
    # The coordinator turns host 1 away; the launcher's store alone can't know of it, but the links do.
    ends = two.attempt(total, host_env=token, op_timeout=5)
    assert all(refused(end, "token") for end in ends[RANKS:]), report(ends)
    assert all(refused(end, "ranks 2, 3") for end in ends[:RANKS]), report(ends)
    for end in two.attempt(total, env={"PODRING_RENDEZVOUS": "store"}, host_env=token, op_timeout=10):
        assert end.error is not None and "PODRING_TOKEN_FILE" in end.error.message, report([end])


def check(ends: list[End], named: str, within: float) -> None:
    """Each is PeerLost, in time, and names who is lost and where."""
    for end in ends:
        assert end.error is not None and end.error.is_a("DistBackendError"), report(ends)
        assert re.search(named, end.error.message), report(ends)
        assert end.seconds < within, report(ends)


def test_killed_rank_is_named_with_its_host(two: Hosts) -> None:
    victim = two.ranks - 1

    def body() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == victim:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1 << 20))

    check(two.attempt(body, op_timeout=60)[:victim], rf"lost rank {victim} on host host1\b", 10)


def test_lost_link_is_named_in_time() -> None:
    """Host 1's cable is pulled: each side names a rank of the other, after the silence that is allowed."""

    def body() -> tuple[str, float]:
        for _ in range(3):
            dist.all_reduce(torch.ones(1 << 16))
        if dist.get_rank() == RANKS:
            ip("link", "set", LIVE, "down")
        begin = time.monotonic()
        try:
            while True:
                dist.all_reduce(torch.ones(1 << 16))
        except RuntimeError as error:
            message = str(error)
        return message, time.monotonic() - begin

    with hosts(2, (IPV4,)) as made:
        silence = {"PODRING_SILENCE_MS": str(int(SILENCE * 1000))}
        results = made.run(body, env=silence)
    for rank, (message, seconds) in enumerate(results):
        other = r"rank [23] on host host1\b" if rank < RANKS else r"rank [01] on host host0\b"
        assert re.search(f"lost {other}", message), message
        assert seconds < SILENCE + SLACK, (rank, seconds, message)


def test_unreachable_host_is_named_with_every_address(half_dead: Hosts) -> None:
    """Host 1 publishes a dead address only: host 0 says which were tried, and what became of each. Host 1 is told so by
    the ranks that give it up."""

    def body() -> tuple[str, float]:
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1 << 16))
        return str(raised.value), time.monotonic() - begin

    where = {"PODRING_INTERFACES": DEAD.interface}
    silence = {"PODRING_SILENCE_MS": "1000"}
    results = half_dead.run(body, env=silence, host_env=lambda host: where if host == 1 else {})
    tried = rf"can't be reached .*{re.escape(DEAD.of(1))}:\d+: no answer within \d+ ms"
    given_up = rf"lost rank [01] on host host0: it gave this process up: {tried}"
    for rank, (message, seconds) in enumerate(results):
        # On host 0 a rank's own finding, or what host 1 says of another's.
        found = rf"lost rank [23] on host host1: {tried}|{given_up}" if rank < RANKS else given_up
        assert re.search(found, message), (rank, message)
        assert seconds < 3 + SLACK, (rank, seconds)


def refused(end: End, *words: str) -> bool:
    """It ended with an error that has these words."""
    return end.error is not None and all(word in end.error.message for word in words)


def test_unknown_interface_is_named_with_those_present(two: Hosts) -> None:
    """On host 1; rank 0 has the launcher's store, and must not be the first to go."""
    where = {"PODRING_INTERFACES": "eth,ib0"}
    ends = two.attempt(total, host_env=lambda host: where if host == 1 else {}, op_timeout=3)
    assert all(refused(end, "PODRING_INTERFACES=eth,ib0", '"ib0"', LIVE) for end in ends[RANKS:]), report(ends)


def test_ports_of_a_range(two: Hosts) -> None:
    """Two ranks a host take a port each; with one port for two, the second says which was taken."""
    assert {value for value, _ in two.run(total, env={"PODRING_PORT": "29600-29601"})} == {two.ranks}
    one = {"PODRING_PORT": "29600"}
    ends = two.attempt(total, host_env=lambda host: one if host == 1 else {}, op_timeout=3)
    assert sum(refused(end, "PODRING_PORT=29600", "in use") for end in ends[RANKS:]) == 1, report(ends)
