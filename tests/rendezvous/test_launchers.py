"""Ranks from launchers' variables: init_method="tpu://…" with no rank and no world size."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rendezvous as torchs_rendezvous

from tests import harness
from tests.rendezvous.servers import HOST, server

Variables = Callable[[int], dict[str, str]]
SECONDS = 4


def srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
    }


def mpirun(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": str(rank),
    }


def jobset(rank: int) -> dict[str, str]:
    """Two slices of one host each, as GKE starts them: every number within a slice is 0."""
    return {
        "JOB_COMPLETION_INDEX": "0",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "MEGASCALE_SLICE_ID": str(rank),
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
    }


def slice_of_two(rank: int) -> dict[str, str]:
    return {"TPU_WORKER_ID": str(rank), "TPU_WORKER_HOSTNAMES": "localhost,localhost"}


def pod(rank: int) -> dict[str, str]:
    """Of a Job that says nothing but its number."""
    return {"JOB_COMPLETION_INDEX": str(rank)}


def metadata(rank: int) -> dict[str, str]:
    """A TPU VM whose launcher sets nothing: its metadata server is here."""
    attributes = {
        "agent-worker-number": str(rank),
        "worker-network-endpoints": f"a:8470:{HOST},b:8470:{HOST}",
    }

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = attributes.get(self.path.rpartition("/")[2])
            self.send_response(404 if value is None else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write((value or "").encode())

    fake = ThreadingHTTPServer((HOST, 0), Answers)
    threading.Thread(target=fake.serve_forever, daemon=True).start()
    return {"PODRING_METADATA": "1", "GCE_METADATA_HOST": f"{HOST}:{fake.server_port}"}


def numbers(variables: Variables) -> int:
    """The rank's number; from now on it has these variables alone."""
    rank = int(os.environ.pop("RANK"))
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    os.environ.update(variables(rank))
    return rank


@pytest.mark.parametrize(
    ("variables", "host"),
    [(srun, ""), (mpirun, HOST), (jobset, ""), (slice_of_two, ""), (metadata, "")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_job_forms(variables: Variables, host: str) -> None:
    """Without a host the launcher names rank 0's."""
    url = f"tpu://{host}:{harness.free_port()}"

    def body() -> tuple[int, float]:
        rank = numbers(variables)
        dist.init_process_group(harness.BACKEND, init_method=url, timeout=timedelta(seconds=20))
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor)
        assert dist.get_rank() == rank
        dist.destroy_process_group()
        return rank, tensor.item()

    assert harness.run(body, 2, init=False) == [(0, 3.0), (1, 3.0)]


def test_one_half_is_given() -> None:
    """The world size by the argument, the rank by the pod."""
    url = f"tpu://{HOST}:{harness.free_port()}"

    def body() -> int:
        rank = numbers(pod)
        dist.init_process_group("gloo", init_method=url, world_size=2)
        dist.barrier()
        assert dist.get_rank() == rank
        dist.destroy_process_group()
        return rank

    assert harness.run(body, 2, init=False) == [0, 1]


@pytest.mark.parametrize(
    ("variables", "given", "says"),
    [
        (srun(1), {"rank": 0}, ('SLURM_PROCID="1" and rank of init_process_group="0" contradict each other',)),
        (mpirun(0), {"world_size": 4}, ('OMPI_COMM_WORLD_SIZE="2"', 'world_size of init_process_group="4"')),
        ({**srun(1), **mpirun(0)}, {}, ('OMPI_COMM_WORLD_RANK="0" and SLURM_PROCID="1" contradict each other',)),
        (
            pod(0),
            {},
            ("no rank", "as RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX=0 is set, but nothing says how many"),
        ),
        ({**srun(1), "SLURM_STEP_ID": ""}, {}, ("no rank", "looked for")),
        (
            {"PODRING_METADATA": "1", "GCE_METADATA_HOST": f"{HOST}:1"},
            {},
            (f"metadata server {HOST}:1", "PODRING_METADATA"),
        ),
    ],
)
def test_what_cannot_be_is_said(
    variables: dict[str, str], given: dict[str, int], says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="tpu:// rendezvous") as caught:
        next(torchs_rendezvous(f"tpu://{HOST}:{harness.free_port()}", **given))
    for text in says:
        assert text in str(caught.value)


def test_the_coordinator_of_its_own_is_the_address(tmp_path: Path) -> None:
    """PODRING_COORDINATOR, and tpu:// with nothing behind it: no rank starts one."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-of-the-job")
    with server("podring", token=token.read_text()) as one:

        def body() -> float:
            numbers(srun)
            dist.init_process_group(harness.BACKEND, init_method="tpu://")
            dist.distributed_c10d._get_default_store().set("said", "")
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            dist.destroy_process_group()
            return tensor.item()

        env = {"PODRING_COORDINATOR": f"{HOST}:{one.port}", "PODRING_TOKEN_FILE": str(token)}
        assert harness.run(body, 2, init=False, env=env) == [2.0, 2.0]
        assert one.client().num_keys() == 1


def test_nobody_is_at_the_coordinator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODRING_COORDINATOR", f"{HOST}:{harness.free_port()}")
    with pytest.raises(dist.DistNetworkError, match="no coordinator at"):
        next(torchs_rendezvous("tpu://?rank=0&world_size=1", timeout=timedelta(seconds=1)))


def test_ranks_off_the_torus_are_told() -> None:
    """A slice's number of the host beside the launcher's, which decides."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        os.environ.update(LOCAL_RANK="0", TPU_WORKER_ID=str(1 - rank), TPU_WORKER_HOSTNAMES="a,b")
        dist.init_process_group(
            harness.BACKEND, init_method=f"file://{os.environ['STORE_FILE']}", rank=rank, world_size=2
        )
        dist.barrier()
        dist.destroy_process_group()

    ends = harness.attempt(body, 2, init=False, env={"LOCAL_WORLD_SIZE": "1", "PODRING_LOG": ""})
    for end in ends:
        assert end.returned, harness.report(ends)
        worker = f"host {end.rank} by the launcher is worker {1 - end.rank} of slice 0"
        decides = "WARN launcher: RANK, LOCAL_WORLD_SIZE decides, not TPU_WORKER_ID, TPU_WORKER_HOSTNAMES: "
        assert decides + worker in end.output, harness.report(ends)


@contextlib.contextmanager
def two_ports() -> Iterator[tuple[int, int]]:
    """Neighbours: one that somebody has, and one that is free."""
    while True:
        port = harness.free_port()
        with socket.socket(socket.AF_INET6) as taken:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            taken.bind(("::", port))
            taken.listen()
            with socket.socket(socket.AF_INET6) as probe, contextlib.suppress(OSError, OverflowError):
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                probe.bind(("::", port + 1))
                probe.close()
                yield port, port + 1
                return


def test_rank_0s_coordinator_has_a_port_of_the_range() -> None:
    """Behind a firewall: PODRING_COORDINATOR_PORT, whose first port somebody has."""

    def body() -> None:
        store = f"file://{os.environ['STORE_FILE']}"
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            harness.BACKEND, init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS)
        )
        if rank == 0:
            with socket.create_connection((HOST, free), timeout=SECONDS):
                pass
        dist.barrier()
        dist.destroy_process_group()

    with two_ports() as (taken, free):
        env = {"PODRING_COORDINATOR_PORT": f"{taken}-{free}"}
        harness.run(body, 2, init=False, env=env)
        ends = harness.attempt(body, 2, init=False, env={"PODRING_COORDINATOR_PORT": str(taken)})
    error = ends[0].error
    assert error is not None and error.is_a("RuntimeError"), harness.report(ends)
    assert f"PODRING_COORDINATOR_PORT={taken}: " in error.message and "in use" in error.message, harness.report(ends)
