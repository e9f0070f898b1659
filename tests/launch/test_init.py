"""Every way to start a job reaches the backend by its name alone."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import BACKEND, PROGRAMS, free_port, run_job
from tests.processes import run_program


@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_init_method(method: str, tmp_path: Path) -> None:
    port = free_port()
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store"}[method]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if method == "env" else {}
    for rank, program in enumerate(run_job("hello.py", 2, url, env=env)):
        assert program.code == 0, program.output
        assert f"rank {rank} of 2: right" in program.output


@pytest.mark.parametrize("ranks", [1, 4])
def test_torchrun(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = run_program([*command, PROGRAMS / "hello.py", BACKEND, "env://"], timeout=90)
    assert program.code == 0, program.output
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: right" in program.output


def test_spawn() -> None:
    program = run_program([sys.executable, PROGRAMS / "spawn.py", BACKEND, str(free_port())], timeout=90)
    assert program.code == 0, program.output
    assert program.output.count("right") == 2


def init(world: int | None = None, seconds: float = 5.0, suffix: str = "") -> None:
    """Joins the job over the harness's store file."""
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{os.environ['STORE_FILE']}{suffix}",
        rank=int(os.environ["RANK"]),
        world_size=world or int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=seconds),
    )


def test_forming_groups_opens_no_connection_to_the_store() -> None:
    """A TCPStore's costs lookups of names on both sides, which take their time, and seconds if one is lost."""

    def connections(port: int) -> int:
        lines = [
            line for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        ]
        mine = {os.readlink(entry).removeprefix("socket:[").removesuffix("]") for entry in sockets()}
        fields = [line.split() for line in lines]
        return sum(int(one[2].rpartition(":")[2], 16) == port and one[9] in mine for one in fields)

    def sockets() -> list[Path]:
        return [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and is_socket(entry)]

    def is_socket(entry: Path) -> bool:
        try:
            return os.readlink(entry).startswith("socket:")
        except FileNotFoundError:  # the listing's own
            return False

    def body() -> list[int]:
        rank = int(os.environ["RANK"])
        place = Path(os.environ["STORE_FILE"] + ".port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            place.with_suffix(".new").write_text(str(store.port))
            place.with_suffix(".new").rename(place)
        else:
            while not place.exists():
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False)
        # What torch tried on its way to the store may take a moment to go.
        settled = time.monotonic() + 10
        while connections(store.port) > 1 and time.monotonic() < settled:
            time.sleep(0.01)
        counts = [connections(store.port)]
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        counts.append(connections(store.port))
        dist.all_reduce(torch.ones(1), group=harness.new_group([0, 1]))
        return [*counts, connections(store.port)]

    for counts in harness.run(body, 2, init=False, timeout=60):
        assert counts == [1, 1, 1], counts


def test_missing_rank_is_named() -> None:
    """Three ranks expected, the third never comes: the other two say so, inside the timeout."""

    def body() -> None:
        if os.environ["RANK"] == "2":
            return
        init()
        dist.all_reduce(torch.ones(1))

    ends = harness.attempt(body, 3, init=False, timeout=30)
    for end in ends[:2]:
        assert end.error is not None, harness.report(ends)
        assert end.error.is_a("DistBackendError"), end.error.trace
        assert re.search(r"rank.*\b2\b", end.error.message), end.error.message
        assert end.seconds < 5 + 5


def test_destroy_and_init_again() -> None:
    def body() -> list[float]:
        sums = []
        for turn in range(3):
            init(seconds=30, suffix=str(turn))
            tensor = torch.full((2,), float(turn + dist.get_rank()))
            dist.all_reduce(tensor)
            sums.append(tensor[0].item())
            dist.destroy_process_group()
        return sums

    assert harness.run(body, 2, init=False) == [[1.0, 3.0, 5.0]] * 2


def test_group_names_and_backend() -> None:
    def body() -> tuple[str, str]:
        group = harness.new_group([0, 1])
        dist.barrier(group)
        return dist.get_backend(), dist.get_backend(group)

    assert harness.run(body, 2) == [(BACKEND, BACKEND)] * 2


def subset() -> float | None:
    group = dist.new_group([0, 2])
    if not isinstance(group, dist.ProcessGroup):
        return None  # not a member
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def same_members_twice() -> float:
    groups = [harness.new_group() for _ in range(2)]
    tensors = [torch.full((3,), float(number + 1)) for number in range(2)]
    order = (0, 1) if dist.get_rank() % 2 else (1, 0)
    works = [dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in order]
    for work in works:
        assert work is not None
        work.wait()
    return float(tensors[0].sum() * 100 + tensors[1].sum())


@pytest.mark.parametrize(
    ("body", "want"), [(subset, [2.0, None, 2.0]), (same_members_twice, [3 * 3 * 100 + 3 * 6.0] * 3)]
)
def test_groups(body: Callable[[], float | None], want: list[float | None]) -> None:
    assert harness.run(body, 3) == want


def test_warm_up_has_nothing_to_do_without_programs_and_says_what_it_takes() -> None:
    """Programs are for the device engine (tests/vchip): here collectives run on the fabric."""

    def body() -> tuple[int, int, list[str]]:
        import podring

        calls: list[Any] = [
            ("all_reduce", torch.bfloat16, 64 << 20),
            ("reduce_scatter", torch.float32, 1 << 30, dist.ReduceOp.AVG),
        ]
        ready = podring.warm_up(None, calls), podring.warm_up(harness.new_group([0, 1]), [])
        gloo = dist.new_group([0, 1], backend="gloo")
        said = []
        wrong: list[tuple[Any, Any]] = [
            (gloo, calls[0]),
            (3, calls[0]),
            (None, ("all_reduec", torch.float32, 8)),
            (None, ("all_reduce", torch.float32, -8)),
            (None, ("all_reduce", torch.float32, 8, "sum")),
            (None, ("all_reduce", torch.quint8, 8)),
        ]
        for group, call in wrong:
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                podring.warm_up(group, [call])
            said.append(f"{type(caught.value).__name__}: {caught.value}")
        return *ready, said

    for first, second, said in harness.run(body, 2):
        assert (first, second) == (0, 0)
        for words, text in zip(["'gloo'", "got 3", "all_reduec", "-8", "'sum'", "QUInt8"], said, strict=True):
            assert words in text, said
        assert [text.split(":")[0] for text in said[:5]] == ["TypeError"] * 2 + ["ValueError"] * 3, said
