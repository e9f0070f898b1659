"""Jobs on virtual chips: which Python has torch_tpu, and what a job's ranks said."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import Program, run_program

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "tests/vchip/scenarios.py"
LIMIT = 240.0
ALL = bool(os.environ.get("PODRING_VCHIP_ALL"))
"""`make vchip` runs everything; without this the few that prove most, in some two minutes."""
thorough = pytest.mark.thorough


@functools.cache
def python() -> Path:
    """A Python that has torch_tpu: PODRING_VCHIP_PYTHON, else .venv-vchip's (made by `scripts/venv vchip`)."""
    named = os.environ.get("PODRING_VCHIP_PYTHON")
    candidates = [Path(named)] if named else [ROOT / ".venv-vchip/bin/python", Path(sys.executable)]
    for candidate in candidates:
        found = (
            subprocess.run(
                [candidate, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch_tpu') is None)"],
                capture_output=True,
                timeout=60,
                check=False,
            )
            if candidate.exists()
            else None
        )
        if found is not None and found.returncode == 0:
            return candidate
    reason = f"no Python with torch_tpu among {', '.join(map(str, candidates))}: scripts/venv vchip"
    if os.environ.get("PODRING_REQUIRE_VCHIP"):
        pytest.fail(reason)
    pytest.skip(reason)


def environment(**more: str) -> dict[str, str]:
    """What every job is started with: quiet, and nothing of the caller's own settings."""
    return {
        "PODRING_PYTHON": str(python()),
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def podring(*words: str | Path, **env: str) -> Program:
    """`podring …` by the Python with torch_tpu."""
    return run_program([python(), "-m", "podring", *words], LIMIT, environment(**env), cwd=ROOT)


@dataclass
class Said:
    """What the ranks of one job said of one scenario."""

    errors: dict[int, str]
    ranks: int
    output: str

    def check(self, name: str) -> None:
        """Fails unless every rank ran the scenario to its end."""
        wrong = {rank: error for rank, error in self.errors.items() if error}
        assert not wrong, f"{name}:\n" + "\n".join(f"rank {rank}: {error}" for rank, error in wrong.items())
        assert sorted(self.errors) == list(range(self.ranks)), f"{name}: not all ranks ended\n{self.output[-6000:]}"


def run_scenarios(names: list[str], ranks: int, slice_name: str = "v5e:2x2", **env: str) -> dict[str, Said]:
    """Runs scenarios in one job of `ranks` ranks on virtual chips."""
    words = ["run", "--slice", slice_name, "--nproc-per-node", str(ranks), str(SCENARIOS), *names]
    with tempfile.TemporaryDirectory() as folder:
        program = podring(*words, SCENARIOS_SAY=folder, **env)
        rows = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    said = {name: Said({}, ranks, program.output) for name in names}
    for row in rows:
        said[row["name"]].errors[row["rank"]] = row["error"]
    return said
