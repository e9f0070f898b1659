"""Ports, names and addresses; and what an earlier life of a job leaves behind."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import BACKEND, PROGRAMS, attempt, free_port, report, run, run_job
from tests.processes import run_program

HOSTS: harness.RankEnv = lambda rank: {"PODRING_HOST_ID": f"host{rank}"}  # noqa: E731
"""Every rank on a host of its own: all bytes go over TCP."""


def total() -> float:
    """A sum over all ranks, of more than one message."""
    tensor = torch.ones(50_000)
    dist.all_reduce(tensor)
    return tensor[-1].item()


def test_port_clash_is_named() -> None:
    """PODRING_PORT is taken: an error with the port's number at once, not a hang."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ends = attempt(total, 2, op_timeout=5, timeout=30, rank_env=lambda rank: {"PODRING_PORT": str(port)})
    for end in ends:
        assert end.error is not None, report(ends)
        assert str(port) in end.error.message and "in use" in end.error.message, end.error.message


def test_two_jobs_on_one_port_of_the_launcher() -> None:
    """A second job with the first one's MASTER_PORT ends with an error; the first one is not disturbed."""

    def body() -> float:
        value = 0.0
        for _ in range(200):
            value = total()
        return value

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (program,) = run_job("hello.py", 1, "env://", env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        assert program.code != 0 and "address already in use" in program.output.lower(), program.output
    assert run(body, 2) == [2.0, 2.0]


def loopback_of_ipv6() -> bool:
    """Whether this machine has IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not loopback_of_ipv6(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    """The launcher's store on ::1, and the ranks on hosts of their own."""
    port = free_port()

    def body() -> float:
        rank = int(os.environ["RANK"])
        dist.init_process_group(BACKEND, init_method=f"tcp://[::1]:{port}", rank=rank, world_size=2)
        value = total()
        dist.destroy_process_group()
        return value

    assert run(body, 2, init=False, rank_env=HOSTS) == [2.0, 2.0]


CLONE_NEWUTS, CLONE_NEWUSER = 0x04000000, 0x10000000


def rename_host(name: bytes) -> None:
    """Gives this process alone another host name. OSError if the kernel does not let us."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.sethostname(name, len(name)) != 0:
        raise OSError(ctypes.get_errno(), "sethostname")


def test_host_name_that_does_not_resolve() -> None:
    """Peers are found by the addresses of their interfaces: nobody resolves the name, it only appears in messages."""

    def body() -> tuple[bool, float]:
        from tests.launch.test_init import init

        try:
            rename_host(b"no-such-host.invalid")
        except OSError:
            renamed = False
        else:
            renamed = True
            assert socket.gethostname() == "no-such-host.invalid"
        init(seconds=20)
        return renamed, total()

    for renamed, value in run(body, 2, init=False, rank_env=HOSTS):
        assert value == 2.0
        if not renamed:
            pytest.skip("the kernel lets this process have no host name of its own")


def test_same_store_twice() -> None:
    """Destroyed and formed again over the very same store: nothing of the first is taken for the second's."""

    def body() -> list[float]:
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        rank, values = int(os.environ["RANK"]), []
        for _ in range(3):
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
            values.append(total())
            dist.destroy_process_group()
        return values

    assert run(body, 2, init=False) == [[2.0] * 3] * 2


def test_stale_members_after_a_restart() -> None:
    """Rank 1's process dies and a new one takes its place over the same store, with the dead one's entries in it: an
    error that names a rank on both, in time, and never a group with a dead member that seems to work."""

    def join(seconds: float) -> Callable[[], float]:
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        dist.init_process_group(
            BACKEND, store=store, rank=int(os.environ["RANK"]), world_size=2, timeout=timedelta(seconds=seconds)
        )
        return total

    def body() -> str:
        rank = int(os.environ["RANK"])
        if rank == 1:
            child = os.fork()
            if child == 0:
                join(20)()
                os._exit(0)
            os.waitpid(child, 0)
        else:
            join(20)()
            with pytest.raises(RuntimeError, match="rank 1"):
                total()
            dist.destroy_process_group()
        try:
            value = join(3)()
        except RuntimeError as error:
            return str(error)
        return "right" if value == 2.0 else f"wrong: {value}"

    ends = attempt(body, 2, init=False, timeout=30)
    for end in ends:
        assert end.returned, report(ends)
        assert end.value == "right" or "rank" in end.value, end.value
        assert end.seconds < 20


def test_torchrun_restarts_a_job() -> None:
    """--max-restarts: all ranks start again, and the second life works."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = run_program([*command, "--max-restarts", "1", PROGRAMS / "restart.py", BACKEND], timeout=90)
    assert program.code == 0, program.output
    assert program.output.count("life 1: right") == 2, program.output


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PODRING_CMA", "perhaps"),
        ("PODRING_RING_BYTES", "1000"),
        ("PODRING_SILENCE_MS", "0"),
        ("PODRING_PORT", "29631-29600"),
        ("PODRING_INTERFACES", "nosuch0"),
        ("PODRING_TOKEN_FILE", "/nonexistent/token"),
    ],
)
def test_bad_setting_is_named(variable: str, value: str) -> None:
    for end in attempt(total, 1, timeout=30, env={variable: value}):
        assert end.error is not None and variable in end.error.message and value in end.error.message, end
