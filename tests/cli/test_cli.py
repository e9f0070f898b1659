"""The `podring` command as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"backend", "op", "dtype", "bytes", "ranks", "hosts", "p50_us", "algbw_gbps", "busbw_gbps", "wrong"}
OPS = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
    "barrier",
]


def command() -> str:
    """PODRING_TEST_COMMAND, else the console script beside this Python, else the newest native build."""
    if named := os.environ.get("PODRING_TEST_COMMAND"):
        return named
    script = Path(sys.executable).with_name("podring")
    if script.exists():
        return str(script)
    built = [path for path in (ROOT / "target").glob("*/podring") if os.access(path, os.X_OK)]
    assert built, "no podring command: run make, or cargo build -p podring-cli"
    return str(max(built, key=lambda path: path.stat().st_mtime))


def environment(**extra: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PODRING_", "TPU_"))}
    env["PODRING_PYTHON"] = sys.executable
    return env | extra


def podring(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command(), *args], env=environment(**env), capture_output=True, text=True, timeout=120, check=False
    )


def bench(json_file: Path, *args: str, code: int = 0, **env: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and everything printed."""
    iterations = [] if "--iters" in args else ["--iters", "10", "--warmup", "2"]
    done = podring("bench", "--json", str(json_file), *iterations, *args, **env)
    assert done.returncode == code, done.stdout + done.stderr
    rows = json.loads(json_file.read_text()) if json_file.exists() else []
    return rows, done.stdout + done.stderr


@pytest.fixture
def played(tmp_path: Path) -> str:
    """A Python in which gloo plays "tpu", and which has the FAULT that the environment names."""
    return script(tmp_path, f'exec {sys.executable} {ROOT}/tests/cli/worker_with_fault.py "$@"')


def script(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_version_and_help() -> None:
    assert podring("--version").stdout.startswith("podring ")
    text = podring("bench", "--help").stdout
    assert all(op in text for op in OPS)
    assert "--vs" in text and "8:64M" in text


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--ops", "all_reduec"], "reduce_scatter"),
        (["--sizes", "8,64Q"], "64K"),
        (["--dtype", "float12"], "bfloat16"),
        (["--redop", "mean"], "avg"),
        (["--dtype", "bool", "--redop", "avg"], "not defined for bool"),
        (["--ranks", "2", "--hosts", "3"], "as many ranks"),
        (["--plot", "x.pdf"], ".png"),
    ],
)
def test_bad_options_say_what_is_valid(args: list[str], named: str) -> None:
    done = podring("bench", *args)
    assert done.returncode == 2
    assert named in done.stderr


def test_doctor_json() -> None:
    done = podring("doctor", "--json", PODRING_TOKEN="hush", MASTER_ADDR="10.1.2.3")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["usable"] else 1)
    assert report["usable"] == all(check["status"] != "error" for check in report["checks"])
    checks = {check["name"]: check for check in report["checks"]}
    for check in report["checks"]:
        assert set(check) == {"group", "name", "status", "summary", "advice", "data"}
        assert (check["advice"] is None) == (check["status"] == "ok")
    assert checks["torch"]["data"]["version"] == importlib.metadata.version("torch")
    assert checks["cores"]["data"]["affinity"] == len(os.sched_getaffinity(0))
    assert isinstance(checks["process_vm_readv"]["data"]["allowed"], bool)
    assert checks["memory"]["data"]["total"] > 0
    assert any(check["data"].get("loopback") for check in report["checks"] if check["group"] == "Network")
    assert checks["MASTER_ADDR"]["summary"] == "10.1.2.3"
    assert "hush" not in done.stdout


def test_doctor_text_fits_80_columns_and_names_a_missing_python() -> None:
    done = podring("doctor", PODRING_PYTHON="/nonexistent/python")
    assert done.returncode == 1
    assert "ERROR  python" in done.stdout and "PODRING_PYTHON" in done.stdout
    # Words longer than a line (paths) cannot be broken.
    assert all(len(line) <= 80 or max(map(len, line.split())) > 60 for line in done.stdout.splitlines())


def test_doctor_says_whose_python_it_is_and_how_to_get_torch_tpu(tmp_path: Path) -> None:
    def checks(**env: str) -> dict[str, Any]:
        done = podring("doctor", "--json", **env)
        return {check["name"]: check for check in json.loads(done.stdout)["checks"]}

    # The command of a Python, where nobody has set one.
    env = environment()
    del env["PODRING_PYTHON"]
    words = [sys.executable, "-m", "podring", "doctor", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    own = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert own["python"]["data"]["from"] == "this command's own" and "PODRING_PYTHON" not in own
    # One with nothing but the standard library, and one that says it has torch_tpu.
    bare = checks(PODRING_PYTHON=script(tmp_path, f'exec {sys.executable} -S "$@"'))
    assert bare["torch_tpu"]["data"] == {"version": None}
    assert "pip install torch_tpu==" in bare["torch_tpu"]["summary"]
    package = tmp_path / "site/torch_tpu-9.8.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 9.8\n")
    having = checks(PODRING_PYTHON=sys.executable, PYTHONPATH=str(package.parent))
    assert having["torch_tpu"]["data"] == {"version": "9.8"} and having["torch_tpu"]["summary"] == "9.8"


def test_run_without_torch_tpu_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('STARTED')")
    bare = script(tmp_path, f'exec {sys.executable} -S "$@"')
    done = podring("run", "--slice", "v5e:2x2", "--python", bare, str(tmp_path / "program.py"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"podring: {bare} has no torch_tpu") and done.stderr.count("\n") == 1, done.stderr
    assert "pip install torch_tpu==" in done.stderr and "scripts/venv vchip" in done.stderr


def test_bench_measures_every_operation(tmp_path: Path) -> None:
    ranks = 2
    picture = tmp_path / "plot.png"
    args = ["--backend", "gloo", "--ops", ",".join(OPS), "--sizes", "8,64K", "--plot", str(picture)]
    rows, text = bench(tmp_path / "rows.json", *args)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [row["op"] for row in rows] == [op for op in OPS[:-1] for _ in range(2)] + ["barrier"]
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1, "reduce": 1, "sendrecv": 1, "barrier": 1}
    for row in rows:
        assert set(row) == KEYS
        assert (row["backend"], row["dtype"], row["ranks"], row["hosts"]) == ("gloo", "float32", ranks, 1)
        assert row["wrong"] == 0 and row["p50_us"] > 0
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        factor = factors.get(row["op"], (ranks - 1) / ranks)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor)
    assert {row["bytes"] for row in rows} == {8, 65536, 0}
    assert "#wrong" in text and "busbw" in text


def test_bench_on_odd_ranks_hosts_and_types(tmp_path: Path) -> None:
    ops = "all_gather,reduce_scatter,all_to_all,all_reduce"
    args = ["--backend", "gloo", "--ops", ops, "--sizes", "10:100K:100", "--dtype", "half", "--redop", "max"]
    rows, _ = bench(tmp_path / "rows.json", *args, "--ranks", "3", "--hosts", "2")
    assert all((row["wrong"], row["dtype"], row["hosts"], row["ranks"]) == (0, "float16", 2, 3) for row in rows)
    # Whole elements on every rank: 10 bytes over 3 ranks of 2-byte elements are 12.
    assert {row["bytes"] for row in rows if row["op"] == "all_gather"} == {12, 1002, 100_002}
    assert {row["bytes"] for row in rows if row["op"] == "all_reduce"} == {10, 1000, 100_000}


def test_backends_take_turns_in_one_run(tmp_path: Path, played: str) -> None:
    # The real backend, unless the suite runs on gloo.
    python = played if os.environ.get("PODRING_TEST_BACKEND") == "gloo" else sys.executable
    args = ["--python", python, "--vs", "gloo", "--sizes", "8,1M", "--ops", "all_reduce", "--ranks", "1,2"]
    rows, text = bench(tmp_path / "rows.json", *args)
    assert [(row["backend"], row["bytes"], row["ranks"]) for row in rows] == [
        (backend, size, ranks) for ranks in (1, 2) for size in (8, 1 << 20) for backend in ("podring", "gloo")
    ]
    assert all(row["wrong"] == 0 for row in rows)
    assert "ratio" in text and "x\n" in text


def test_wrong_results_are_counted_and_fail(tmp_path: Path, played: str) -> None:
    args = ["--python", played, "--ops", "all_reduce,all_gather", "--sizes", "64K"]
    rows, text = bench(tmp_path / "rows.json", *args, code=1, FAULT="corrupt")
    # One element on rank 0, found before the timing and after it.
    assert {row["op"]: row["wrong"] for row in rows} == {"all_reduce": 2, "all_gather": 0}
    assert "2 wrong elements in 1 of 2 rows" in text


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", ["rank 1: failed (exit status: 1)", "planted fault"]),
        # The hanging rank is named and shows its stack.
        ("hang", ["rank 1", "worker_with_fault.py", "in all_reduce"]),
    ],
)
def test_a_rank_that_fails_ends_the_run(tmp_path: Path, played: str, fault: str, words: list[str]) -> None:
    start = time.monotonic()
    args = ["--python", played, "--ops", "all_reduce", "--sizes", "64K", "--iters", "100", "--timeout", "8"]
    rows, text = bench(tmp_path / "rows.json", *args, code=1, FAULT=fault)
    assert not rows
    for word in words:
        assert word in text
    assert time.monotonic() - start < 60


def test_a_python_without_torch_is_told(tmp_path: Path) -> None:
    python = script(tmp_path, "echo no torch here >&2; exit 3")
    done = podring("bench", "--python", python, "--sizes", "8")
    assert done.returncode == 1
    assert "exit status: 3" in done.stderr and "no torch here" in done.stderr
    done = podring("bench", "--python", "/nonexistent/python")
    assert done.returncode == 1
    assert "/nonexistent/python" in done.stderr


def test_plot_without_matplotlib_is_told_before_measuring(tmp_path: Path) -> None:
    python = script(tmp_path, "echo False")
    done = podring("bench", "--python", python, "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 1
    assert "needs matplotlib" in done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ranks_leave_when_the_command_is_killed() -> None:
    args = [command(), "bench", "--backend", "gloo", "--ops", "all_reduce", "--sizes", "8", "--seconds", "600"]
    with subprocess.Popen(args, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            ranks = wait_for(lambda: children(running.pid), lambda found: len(found) == 2, 30)
            # Gloo's threads run: the plan is read long since, and only the watching thread can see the end.
            wait_for(lambda: min(map(threads, ranks)), lambda least: least >= 3, 60)
            assert running.poll() is None
        finally:
            running.send_signal(signal.SIGKILL)
    wait_for(lambda: [rank for rank in ranks if alive(rank)], lambda left: not left, 20)


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(look: Any, good: Any, limit: float) -> Any:
    end = time.monotonic() + limit
    while not good(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found
