"""The demo's maths: the 2 × 2 mesh trains as one process would on the same batches."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests import harness

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import model
import train

SHAPE = replace(model.Shape(), width=32, layers=2, length=32)
STEPS = range(6)


def on_mesh(directory: Path) -> tuple[list[float], list[float]]:
    """Losses of all steps, and those of the last steps once more after a checkpoint's way to disk and back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    text, half = train.load_text(), len(STEPS) // 2

    def start(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        network = model.parallelize(model.Transformer(SHAPE, seed), mesh)
        if harness.BACKEND == "gloo":
            model.sum_gradients(network)
        return network, train.make_optimizer(network)

    def go(network: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        return train.train(network, optimizer, mesh, text, SHAPE, steps, lambda step, loss: None)

    network, optimizer = start(seed=0)
    losses = go(network, optimizer, STEPS[:half])
    train.save(network, optimizer, directory)
    losses += go(network, optimizer, STEPS[half:])
    other = start(seed=1)
    train.load(*other, directory)
    return losses, go(*other, STEPS[half:])


def alone() -> list[float]:
    """The same training in one process on the whole batches."""
    network = model.Transformer(SHAPE)
    optimizer = train.make_optimizer(network)
    text = train.load_text()
    return [train.train_step(network, optimizer, *train.sample(text, step, SHAPE.length)).item() for step in STEPS]


def test_mesh_trains_like_one_process(tmp_path: Path) -> None:
    (want,) = harness.run(alone, 1, init=False)
    for losses, resumed in harness.run(on_mesh, 4, tmp_path / "checkpoint", timeout=120):
        assert losses == pytest.approx(want, abs=2e-4)
        assert losses[-1] < losses[0]
        assert resumed == losses[len(STEPS) // 2 :]
