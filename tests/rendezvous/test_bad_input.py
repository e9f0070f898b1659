"""What init_process_group says when the job's rendezvous is wrong: on every rank, by name, inside the timeout."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import harness
from tests.harness import End, attempt, report, run
from tests.rendezvous import servers
from tests.rendezvous.coordinator import certificates, coordinator
from tests.rendezvous.test_world import ALONE, ONE, QUICK, join, total

SECONDS = 3.0
"""The groups' timeout."""
LAYOUTS = {"one host": ONE, "hosts of their own": ALONE}


def joined() -> float:
    """Joins, and uses the group."""
    join(SECONDS)
    return total()


def formed() -> float:
    """The same where nothing is wrong: no haste."""
    join()
    return total()


def refused(ends: list[End], *says: str, kind: str = "RuntimeError") -> None:
    """Every end is an error that says all this, in time."""
    assert ends
    for end in ends:
        assert end.error is not None, report(ends)
        assert end.error.is_a(kind), report(ends)
        for text in says:
            assert text in end.error.message, report(ends)
        assert end.seconds < SECONDS + 4, report(ends)


def ends(layout: str, env: Mapping[str, str], ranks: int = 3, rank_env: harness.RankEnv | None = None) -> list[End]:
    """How `ranks` ranks end that join."""
    extra = rank_env or (lambda rank: {})
    both: harness.RankEnv = lambda rank: {**LAYOUTS[layout](rank), **extra(rank)}  # noqa: E731
    return attempt(joined, ranks, init=False, timeout=25, env={**QUICK, **env}, rank_env=both)


def in_layouts(name: str, job: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """The job in each layout."""
    return {f"{name}, {layout}": functools.partial(job, layout) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def lacking() -> Iterator[servers.Jobs]:
    """Jobs in which somebody never comes: most of the time they wait, so all at once."""
    with servers.jobs(
        {
            **in_layouts("no coordinator", no_coordinator),
            **in_layouts("no rank 2", no_rank_2),
            "no rank 0": no_rank_0,
            "no word": no_word,
        }
    ) as made:
        yield made


@pytest.fixture(scope="module")
def confused() -> Iterator[servers.Jobs]:
    """Jobs whose ranks don't agree."""
    with servers.jobs(
        {
            **in_layouts("twins", twins),
            **in_layouts("sizes", differing_sizes),
            "launchers": contradicting_launchers,
        }
    ) as made:
        yield made


def no_coordinator(layout: str) -> tuple[str, list[End]]:
    address = f"127.0.0.1:{harness.free_port()}"
    return address, ends(layout, {"PODRING_COORDINATOR": address})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coordinator_absent(layout: str, lacking: servers.Jobs) -> None:
    address, three = lacking.ended(f"no coordinator, {layout}")
    refused(three, address, "refused", kind="DistNetworkError")


@contextmanager
def another_program(greeting: bytes) -> Iterator[int]:
    """Something else that listens; gives its port. An empty greeting: it says nothing and keeps the line."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.settimeout(0.1)
        done = threading.Event()
        kept = []

        def serve() -> None:
            while not done.is_set():
                try:
                    caller, _ = listener.accept()
                except TimeoutError:
                    continue
                kept.append(caller)
                if greeting:
                    caller.sendall(greeting)
                    caller.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join()
            for caller in kept:
                caller.close()


def test_port_of_another_program() -> None:
    """A port that is held by something else."""
    with another_program(b"SSH-2.0-something else\r\n") as port:
        refused(ends("one host", {"PODRING_COORDINATOR": f"127.0.0.1:{port}"}), str(port), "is no podring coordinator")


def no_word() -> tuple[int, list[End]]:
    with another_program(b"") as port:
        return port, ends("one host", {"PODRING_COORDINATOR": f"127.0.0.1:{port}"})


def test_port_that_says_nothing(lacking: servers.Jobs) -> None:
    """A half-open connection."""
    port, three = lacking.ended("no word")
    refused(three, str(port), "said nothing")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef0123\n")
    return path


def test_wrong_token(token: Path, tmp_path: Path) -> None:
    """All of them, and one of them; and none, where the coordinator wants one."""
    other = tmp_path / "other"
    other.write_text("fedcba98765432100123\n")
    with coordinator("--token-file", str(token)) as standing:
        there = {"PODRING_COORDINATOR": standing.address}
        odd: harness.RankEnv = lambda rank: {"PODRING_TOKEN_FILE": str(other if rank == 1 else token)}  # noqa: E731
        ended = servers.side_by_side(
            {
                "all": lambda: ends("one host", {"PODRING_TOKEN_FILE": str(other), **there}),
                "none": lambda: ends("one host", there),
            }
        )
        refused(ended["all"], "wrong token", kind="DistNetworkError")
        refused(ended["none"], "no token given")
        # By itself: the others' ranks have the same numbers, and may come to this one's agent.
        some = ends("one host", there, rank_env=odd)
        refused([some[1]], "wrong token")
        refused([some[0], some[2]], "rank 1")
        # And the right one.
        env = {"PODRING_TOKEN_FILE": str(token), **there}
        assert run(formed, 3, init=False, env=env) == [3.0] * 3


def test_token_that_cannot_be_used(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    refused(ends("one host", {"PODRING_TOKEN_FILE": missing}, ranks=2), missing, kind="ValueError")


def test_token_file_keeps_the_secret_out_of_the_store(token: Path, tmp_path: Path) -> None:
    """Rank 0's own coordinator, with the token from the file."""
    store = tmp_path / "store"

    def body() -> float:
        dist.init_process_group(
            harness.BACKEND, init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=2
        )
        value = total()
        if os.environ["RANK"] == "0":
            text = store.read_bytes()
            assert b"podring/coordinator" in text and b"0123456789abcdef" not in text
            assert b'"token":null' in text
        dist.barrier()
        return value

    assert run(body, 2, init=False, env={"PODRING_TOKEN_FILE": str(token)}, rank_env=ALONE) == [2.0, 2.0]


def test_certificates(tmp_path: Path) -> None:
    """The right ones, those of another authority, and none."""
    cert, key, ca = certificates(tmp_path, "ours")
    other = certificates(tmp_path, "theirs")

    def tls(cert: Path, key: Path, ca: Path) -> Mapping[str, str]:
        return {"PODRING_TLS_CERT": str(cert), "PODRING_TLS_KEY": str(key), "PODRING_TLS_CA": str(ca)}

    with coordinator("--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(ca)) as standing:
        there = {"PODRING_COORDINATOR": standing.address}
        right = {**there, **tls(cert, key, ca)}
        assert run(formed, 3, init=False, env=right, rank_env=ALONE) == [3.0] * 3
        refused(ends("one host", {**there, **tls(*other)}), "certificate", kind="DistNetworkError")
        refused(ends("one host", there), standing.address)
    # Rank 0's own, and no token anywhere.
    assert run(formed, 2, init=False, env=tls(cert, key, ca), rank_env=ALONE) == [2.0, 2.0]
    refused(ends("one host", {"PODRING_TLS_CERT": str(cert)}, ranks=2), "PODRING_TLS_KEY", kind="ValueError")


def no_rank_2(layout: str) -> list[End]:
    def body() -> None:
        if os.environ["RANK"] != "2":
            joined()

    extra = {"LOCAL_WORLD_SIZE": "4"} if layout == "one host" else {}
    return attempt(body, 4, init=False, timeout=25, env={**QUICK, **extra}, rank_env=LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_that_never_comes(layout: str, lacking: servers.Jobs) -> None:
    """Named on every other rank; with its host, where the launcher tells."""
    four = lacking.ended(f"no rank 2, {layout}")
    refused([four[0], four[1], four[3]], "rank 2", kind="DistBackendError")
    if layout == "one host":
        refused([four[0], four[1], four[3]], f"rank 2 on {socket.gethostname()}")


def no_rank_0() -> list[End]:
    def body() -> None:
        if os.environ["RANK"] != "0":
            joined()

    return attempt(body, 3, init=False, timeout=25, env={**QUICK, "MASTER_ADDR": "head-node"}, rank_env=ONE)


def test_rank_0_that_never_comes(lacking: servers.Jobs) -> None:
    refused(lacking.ended("no rank 0")[1:], "rank 0 on head-node", kind="DistBackendError")


def twins(layout: str) -> list[End]:
    """Rank 2 believes that it is rank 1."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(min(rank, 1))
        dist.init_process_group(
            harness.BACKEND, store=store, rank=min(rank, 1), world_size=3, timeout=timedelta(seconds=SECONDS)
        )

    return attempt(body, 3, init=False, timeout=25, env=QUICK, rank_env=LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_with_one_number(layout: str, confused: servers.Jobs) -> None:
    refused(confused.ended(f"twins, {layout}"), "rank 1 announced twice")


def differing_sizes(layout: str) -> list[End]:
    """Rank 1 believes in four ranks, the others in three."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        os.environ["WORLD_SIZE"] = size = "4" if rank == 1 else "3"
        dist.init_process_group(
            harness.BACKEND, store=store, rank=rank, world_size=int(size), timeout=timedelta(seconds=SECONDS)
        )

    return attempt(body, 3, init=False, timeout=25, env=QUICK, rank_env=LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_differing_world_sizes(layout: str, confused: servers.Jobs) -> None:
    refused(confused.ended(f"sizes, {layout}"), "4", "3")


def test_rank_of_an_earlier_epoch() -> None:
    """All but rank 1 go on to the next world, over the same coordinator. Rank 1 hears that they have left; the next
    world says who is missing, and forms when rank 1 comes."""
    with coordinator() as standing:

        def body() -> tuple[str, float]:
            rank = int(os.environ["RANK"])
            join(20)
            total()
            if rank == 1:
                time.sleep(1)
                with pytest.raises(RuntimeError) as caught:
                    total()
                dist.destroy_process_group()
                join(20, suffix="again")
                return str(caught.value), total()
            dist.destroy_process_group()
            join(20, suffix="again")
            return "rank 0 or 2", total()

        env = {**QUICK, "PODRING_COORDINATOR": standing.address}
        for text, value in run(body, 3, init=False, env=env, rank_env=ALONE):
            assert value == 3.0 and ("rank 0" in text or "rank 2" in text), text


def test_launcher_that_says_otherwise() -> None:
    """RANK beside another rank given to init_process_group, of the same number of processes."""

    def body() -> None:
        given = 1 - int(os.environ["RANK"])
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        dist.init_process_group(
            harness.BACKEND, store=store, rank=given, world_size=2, timeout=timedelta(seconds=SECONDS)
        )

    two = attempt(body, 2, init=False, timeout=25, env=QUICK)
    refused(two, "RANK=", "rank of init_process_group=", kind="ValueError")


def contradicting_launchers() -> list[End]:
    return ends("one host", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ranks=2)


def test_launchers_that_contradict_each_other(confused: servers.Jobs) -> None:
    refused(confused.ended("launchers")[:1], "RANK", "SLURM_PROCID", kind="ValueError")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PODRING_RENDEZVOUS", "etcd"), ("PODRING_COORDINATOR", "nowhere"), ("PODRING_COORDINATOR", "host:0")],
)
def test_bad_setting_is_named(variable: str, value: str) -> None:
    refused(ends("one host", {variable: value}, ranks=2), variable, value, kind="ValueError")


def test_garbage_on_the_coordinators_port() -> None:
    """Connections that speak something else, or nothing, while a job forms and runs."""
    with coordinator() as standing:
        lines = []
        for said in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 5000,
            os.urandom(5000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            line = socket.create_connection(("127.0.0.1", standing.port))
            line.sendall(said)
            lines.append(line)
        env = {**QUICK, "PODRING_COORDINATOR": standing.address}
        assert run(formed, 3, init=False, env=env, rank_env=ALONE) == [3.0] * 3
        for line in lines:
            line.close()
