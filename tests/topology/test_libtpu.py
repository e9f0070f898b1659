"""podring's slices against libtpu itself, live: ids, coordinates, list order, processes, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from podring import _core

from tests.topology.jax_meshes import SLICES

LONE = [*SLICES, "v4:2x2x1", "v4:4x4", "v4:4x4x4", "v4:8x16x16", "v5e:1x8", "v5p:4x1x1", "v5p:4x4x4"]
SEVERAL = [("v5e:4x4", 2), ("v4:2x2x2", 2), ("tpu7x:2x2x1", 3), ("v5e:2x2", 10)]
REFUSED = [
    ("v5p:3x3x3", "not divisible"),
    ("v5e:5x7", "not divisible"),
    ("v9:2x2", "v9"),
    ("v5e:4", "v5e:4"),
    ("v5e:4xx4", "v5e:4xx4"),
    ("v5e:axb", "v5e:axb"),
    ("v5e:4x4_twisted", "twist"),
]
# libtpu dies of these; the options are what it takes to get there.
FATAL = [("v5e:0x4", {}, "at least 1"), ("v5p:4x4x16_twisted", {"wrap": [1, 1, 1]}, "cannot be twisted")]


@pytest.fixture(scope="module")
def libtpu() -> dict[str, dict[str, Any]]:
    """libtpu's answers by question, from a process of its own."""
    # A twisted torus must be told to wrap; podring knows that it does.
    questions: list[tuple[str, dict[str, Any]]] = [
        (name, {"wrap": [1, 1, 1]} if name.endswith("_twisted") else {}) for name in LONE
    ]
    questions += [(name, {"num_slices": slices}) for name, slices in SEVERAL]
    questions += [(name, {}) for name, _ in REFUSED]
    questions += [(name, options) for name, options, _ in FATAL]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run(
        [sys.executable, "-m", "tests.topology.libtpu_devices"],
        input=lines,
        capture_output=True,
        timeout=300,
        check=True,
        text=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(questions)
    keys = [name + (f"*{options['num_slices']}" if "num_slices" in options else "") for name, options in questions]
    return dict(zip(keys, answers, strict=True))


@pytest.mark.parametrize("name", [*LONE, *(f"{name}*{slices}" for name, slices in SEVERAL)])
def test_devices(libtpu: dict[str, dict[str, Any]], name: str) -> None:
    ours = [[number, list(coords), *rest] for number, coords, *rest in _core.topology_devices(name)]
    assert ours == libtpu[name]["devices"]


@pytest.mark.parametrize(("name", "why"), REFUSED)
def test_refusals(libtpu: dict[str, dict[str, Any]], name: str, why: str) -> None:
    assert "error" in libtpu[name]
    with pytest.raises(ValueError, match=why):
        _core.topology_devices(name)


@pytest.mark.parametrize(("name", "why"), [(name, why) for name, _, why in FATAL])
def test_what_kills_libtpu_is_an_error_here(libtpu: dict[str, dict[str, Any]], name: str, why: str) -> None:
    assert "died" in libtpu[name]
    with pytest.raises(ValueError, match=why):
        _core.topology_devices(name)
