"""`podring bench rendezvous`, small: what it measures and says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_cli import podring


def test_init_and_new_group_are_timed_beside_gloo(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    small = ["--hosts", "4", "--ranks-per-host", "2", "--seconds", "0.05", "--no-mtls"]
    done = podring("bench", "rendezvous", *small, "--init-ranks", "2,3", "--init-rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(file.read_text())
    assert numbers["ranks"] == 8 and numbers["join_s"] > 0
    for name in ("init_ms", "discovery_ms", "new_group_ms", "store_barrier_ms"):
        assert set(numbers[name]) == {"2", "3"}, numbers[name]
        for ours, gloos in numbers[name].values():
            assert 0 < ours < 10_000 and 0 < gloos < 10_000, numbers[name]
    assert "2 ranks: init_process_group" in done.stderr


def test_missing_torch_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    python.chmod(0o755)
    small = ["--hosts", "1", "--seconds", "0.01", "--no-mtls", "--init-ranks", "2", "--init-rounds", "1"]
    done = podring("bench", "rendezvous", *small, "--python", str(python))
    assert done.returncode == 1 and "no torch here" in done.stderr, done.stdout + done.stderr
