"""The c10d face without the core: what it asks of the core, what it makes of the answers, and how a process ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.face import mocked

HERE = Path(__file__).parent
CHECKS = [name for name in vars(mocked) if name.startswith("check_")]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mock core, compiled."""
    path = tmp_path_factory.mktemp("face") / "mock.so"
    compiler = os.environ.get("CC", "cc")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, "-o", path, HERE / "mock_core.c"], check=True, timeout=60)
    return path


def play(library: Path, *how: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: its `podring._core` is the mock."""
    command = [sys.executable, str(HERE / "mocked.py"), str(library), *how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="session")
def results(library: Path) -> dict[str, str]:
    """Each check's traceback, empty if it passed."""
    ended = play(library)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("check", CHECKS)
def test_face(results: dict[str, str], check: str) -> None:
    assert results[check] == "", results[check]


@pytest.mark.parametrize("how", ["never-ended", "ended-late", "ended-in-finalization", "forked"])
def test_leaving_without_destroy(library: Path, how: str) -> None:
    started = time.monotonic()
    ended = play(library, how)
    assert ended.returncode == 7, ended.stderr
    assert time.monotonic() - started < 60
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "called back" not in ended.stdout
