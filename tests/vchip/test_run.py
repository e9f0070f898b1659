"""`podring run` and the hook: what starts, what is refused, and what everybody is told."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run_program
from tests.vchip import jobs

FACTS = """
    import os, torch, torch.distributed as dist
    from podring import _core
    # Before there is a group: PJRT starts, and torch_tpu sets libtpu's variables, which the group reads.
    one = torch.ones(3, device="tpu")
    dist.init_process_group("tpu")
    dist.all_reduce(one)
    # In one piece: both ranks write to one pipe.
    os.write(1, f"SUM {dist.get_rank()} {one.cpu().tolist()}\\n".encode())
    dist.destroy_process_group()
"""


# Another plugin than podring's, as a user may have it set.
LIBTPU = str(Path(str(find_spec("libtpu").origin)).with_name("libtpu.so"))  # type: ignore[union-attr]


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


def alone(folder: Path, text: str, **env: str) -> tuple[int | None, str]:
    """One process without a launcher."""
    program = run_program([jobs.python(), script(folder, text)], 90.0, jobs.environment(**env), cwd=folder)
    return program.code, program.output


def test_a_module_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(textwrap.dedent(FACTS))
    program = jobs.podring(
        "run", "--slice", "v5e:2x2", "--nproc-per-node", "1", "--hosts", "2", "-m", "facts", PYTHONPATH=str(tmp_path)
    )
    assert program.code == 0, program.output[-6000:]
    assert sorted(line for line in program.output.splitlines() if line.startswith("SUM")) == [
        "SUM 0 [2.0, 2.0, 2.0]",
        "SUM 1 [2.0, 2.0, 2.0]",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--slice", "v5e:3x7", "x.py"], "v5e"),
        (["--slice", "v9z:2x2", "x.py"], "v9z"),
        (["--slice", "v5e:2x2", "--nproc-per-node", "5", "x.py"], "which has 4 devices"),
        (["--slice", "v5e:2x2", "--hosts", "3", "x.py"], "don't divide over 3 hosts"),
        (["x.py"], "which slice?"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words: list[str], expected: str) -> None:
    begin = time.monotonic()
    program = jobs.podring("run", *words, PODRING_SLICE="")
    assert program.code == 1 and expected in program.output, program.output
    assert time.monotonic() - begin < 20


@jobs.thorough
def test_the_demo_trains_on_four_chips(tmp_path: Path) -> None:
    example = jobs.ROOT / "examples/train.py"
    program = jobs.podring("run", "--slice", "v5e:2x2", str(example), "--steps", "24", "--out", str(tmp_path))
    assert program.code == 0, program.output[-6000:]
    assert "tpu on tpu: {'dp': 2, 'tp': 2} mesh" in program.output, program.output[-6000:]
    losses = json.loads((tmp_path / "loss.json").read_text())
    assert len(losses) == 24 and losses[-1] < 0.6 * losses[0], losses


@jobs.thorough
def test_one_module_under_both_names_and_errors_are_raised_late(tmp_path: Path) -> None:
    code, output = alone(
        tmp_path,
        """
        import ctypes, os, sys
        import torch
        from podring import _core
        # The plugin that torch_tpu loaded is the module that Python loaded.
        assert os.path.realpath(_core.__file__) == os.environ["TPU_LIBRARY_PATH"], os.environ["TPU_LIBRARY_PATH"]
        mapped = {line.split()[-1] for line in open("/proc/self/maps") if "_core" in line and "podring" in line}
        assert len(mapped) == 1, mapped
        assert _core.interposed() == (True, None), _core.interposed()
        torch.ones(1, device="tpu").cpu()
        # The interposer keeps out of the way of what it doesn't override, and refuses by name.
        assert not _core.interpose("other.so", "v5e:4x4")
        print("FINE")
        """,
        PODRING_SLICE="v5e:2x2",
    )
    assert code == 0 and "FINE" in output, output[-4000:]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({"PODRING_SLICE": "v5e:3x7"}, "PODRING_SLICE=v5e:3x7", marks=jobs.thorough),
        # As a rank of torchrun's has it.
        ({"PODRING_SLICE": "v5e:2x2", "RANK": "4", "WORLD_SIZE": "8"}, "the slice v5e:2x2 has 4 devices"),
        pytest.param(
            {"PODRING_SLICE": "v5e:2x2", "TPU_LIBRARY_PATH": LIBTPU},
            "set TPU_LIBRARY_PATH to the latter",
            marks=jobs.thorough,
        ),
    ],
)
def test_import_torch_never_fails(tmp_path: Path, env: dict[str, str], expected: str) -> None:
    _, output = alone(
        tmp_path,
        """
        import torch, torch.distributed as dist
        print("IMPORTED", flush=True)
        store = dist.HashStore()
        try:
            dist.init_process_group("tpu", store=store, rank=0, world_size=1)
        except RuntimeError as error:
            print("RAISED", error, flush=True)
        """,
        **env,
    )
    assert "IMPORTED" in output and "RAISED" in output and expected in output, output[-4000:]


def test_without_autoload_cpu_works_and_says_why(tmp_path: Path) -> None:
    code, output = alone(
        tmp_path,
        """
        import sys, warnings
        import torch, torch.distributed as dist
        assert "torch_tpu" not in sys.modules
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
        assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in str(one.message) for one in told), told
        one = torch.ones(3)
        dist.all_reduce(one)
        print("FINE", one.tolist(), flush=True)
        one.to("tpu")
        """,
        PODRING_SLICE="v5e:2x2",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert code == 1 and "FINE [1.0, 1.0, 1.0]" in output, output[-4000:]
    assert "podring: PODRING_SLICE is set, but TORCH_DEVICE_BACKEND_AUTOLOAD=0" in output, output[-4000:]


@jobs.thorough
@pytest.mark.parametrize("words", ['torch.ones(1, device="tpu")', 'torch.nn.Linear(2, 2).to("tpu")', "torch.tpu"])
def test_without_autoload_an_error_says_why(tmp_path: Path, words: str) -> None:
    env = {"PODRING_SLICE": "v5e:2x2", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code, output = alone(tmp_path, f"import torch\n{words}", **env)
    assert code == 1 and "podring: PODRING_SLICE is set, but TORCH_DEVICE_BACKEND_AUTOLOAD=0" in output, output[-4000:]
    # Other errors are no business of it.
    code, output = alone(tmp_path, "import torch\ntorch.ones(2) @ torch.ones(3)", **env)
    assert code == 1 and "podring" not in output, output[-4000:]


@pytest.mark.skipif(find_spec("torch_tpu") is not None, reason="torch_tpu is installed where the tests run")
def test_without_torch_tpu_the_error_names_it(tmp_path: Path) -> None:
    text = """
        import torch, torch.distributed as dist
        try:
            dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
        except RuntimeError as error:
            print("RAISED", error)
        """
    env = jobs.environment(PODRING_SLICE="v5e:2x2")
    program = run_program([sys.executable, script(tmp_path, text)], 90.0, env, cwd=tmp_path)
    assert program.code == 0, program.output[-4000:]
    assert "needs the package torch_tpu, which is not installed" in program.output, program.output[-4000:]


def test_libtpu_without_a_chip(tmp_path: Path) -> None:
    # No slice is asked for: torch_tpu finds no chip, and podring serves CPU tensors.
    code, output = alone(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
        one = torch.ones(3)
        dist.all_reduce(one)
        try:
            torch.ones(3, device="tpu").cpu()
        except Exception as error:
            print("RAISED", type(error).__name__, error)
        print("FINE", one.tolist())
        """,
        PODRING_SLICE="",
        TPU_LIBRARY_PATH=LIBTPU,
    )
    assert code == 0 and "RAISED" in output and "FINE [1.0, 1.0, 1.0]" in output, output[-4000:]


@pytest.mark.parametrize("version", ["0.1.0", pytest.param("0.3.0", marks=jobs.thorough)])
def test_unknown_torch_tpu_is_staged_with_one_warning(tmp_path: Path, version: str) -> None:
    code, output = alone(
        tmp_path,
        f"""
        import torch, torch.distributed as dist
        from podring import _register
        dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
        _register.face().set_torch_tpu("{version}")
        for _ in range(3):
            one = torch.full((1000,), 2.0, device="tpu")
            dist.all_reduce(one)
            assert one.cpu().sum() == 2000
        print("FINE")
        """,
        PODRING_SLICE="v5e:2x2",
    )
    assert code == 0 and "FINE" in output, output[-4000:]
    assert output.count("stages tpu tensors") == 1 and f"torch_tpu {version}" in output, output[-4000:]


@jobs.thorough
def test_a_rank_killed_before_it_sends_is_named(tmp_path: Path) -> None:
    # By torch_tpu's own process group, whose messages go from chip to chip.
    program = script(
        tmp_path,
        f"""
        import os, signal, time, torch, torch.distributed as dist
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.init_process_group("tpu")
        rank = dist.get_rank()
        one = torch.full((1000,), float(rank), device="tpu")
        if rank == 0:
            dist.recv(one, 1)
            assert one.cpu().sum() == 1000
        else:
            dist.send(one, 0)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            dist.recv(one, 1)
            one.cpu()
        except RuntimeError as error:
            print("LOST", error, flush=True)
            assert time.monotonic() - begin < 30
        os._exit({signal.SIGUSR1.value})
        """,
    )
    output = jobs.podring("run", "--slice", "v5e:1x2", str(program), PODRING_DISABLE="1").output
    assert "LOST" in output and "lost rank 1" in output, output[-4000:]


@pytest.mark.parametrize(
    ("disable", "compiled"),
    [pytest.param("0", False, marks=jobs.thorough), pytest.param("1", False, marks=jobs.thorough), ("0", True)],
)
def test_a_killed_rank_is_named(tmp_path: Path, disable: str, compiled: bool) -> None:
    # With "1" the collective is a program, and compiled it is inside of one, which fails when its result is asked for.
    program = script(
        tmp_path,
        f"""
        import os, signal, sys, time, torch, torch.distributed as dist
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher ends who is left; first it says whom it lost.
        import torch.distributed._functional_collectives as funcol
        dist.init_process_group("tpu")
        group = dist.group.WORLD
        one = torch.ones(1 << 20, device="tpu")

        def together():
            if not {compiled}:
                dist.all_reduce(one)
                return one.cpu()
            return add(one).cpu()

        add = torch.compile(lambda tensor: funcol.all_reduce(tensor * 2, "sum", group) + 1)
        together()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            together()
        except RuntimeError as error:
            print("LOST", type(error).__name__, error, flush=True)
            assert time.monotonic() - begin < 30
        os._exit({signal.SIGUSR1.value})
        """,
    )
    words = ["run", "--slice", "v5e:1x2", str(program)]
    output = jobs.podring(*words, PODRING_DISABLE=disable).output
    assert "LOST " + ("DistBackendError" if disable == "0" and not compiled else "") in output and "rank 1" in output, (
        output[-4000:]
    )
