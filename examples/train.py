"""Trains a byte-level transformer on Python's own documentation over a 2-D mesh, FSDP2 × tensor parallel.

    torchrun --standalone --nproc-per-node 4 examples/train.py             # trains; a checkpoint half way
    torchrun --standalone --nproc-per-node 4 examples/train.py --resume    # from the checkpoint: the same losses?

Writes loss.json, loss.png and checkpoint/ under --out. Ends with exit code 1 if the loss does not fall, or if the
resumed run's losses are not those of the first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from model import Shape, Transformer, parallelize, sum_gradients
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from torch.optim import Optimizer

BATCH = 16
"""Sequences per step, over all ranks."""
RESUMED_STEPS = 10
SAME = 1e-5
"""How far a resumed loss may lie from the first run's: some 50 units in the last place of a float32 loss."""


def load_text() -> Tensor:
    """Python's documentation topics, as bytes [n], half a megabyte: on any machine that has Python."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def sample(text: Tensor, step: int, length: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Step `step`'s inputs and targets [BATCH / parts, length], the part-th of `parts`; the same on every call."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - length - 1, (BATCH,), generator=generator)
    mine = starts.chunk(parts)[part]
    rows = torch.stack([text[start : start + length + 1] for start in mine.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def make_optimizer(model: nn.Module) -> Optimizer:
    """What all runs train with."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """One step; gives this rank's loss, in nats per byte."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(
    model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh, text: Tensor, shape: Shape, steps: range, after: Any
) -> list[float]:
    """Trains for `steps`, calling after(step, loss) each time; gives the losses, averaged over the mesh's "dp"."""
    dp = mesh["dp"]
    losses = []
    for step in steps:
        tokens, targets = sample(text, step, shape.length, dp.get_local_rank(), dp.size())
        loss = train_step(model, optimizer, tokens.to(mesh.device_type), targets.to(mesh.device_type))
        dist.all_reduce(loss, group=dp.get_group())
        losses.append(loss.item() / dp.size())
        after(step, losses[-1])
    return losses


class Progress:
    """One line that fills on a terminal; a plain line every tenth of the way elsewhere. Silent if not `shown`."""

    def __init__(self, steps: range, shown: bool) -> None:
        self.steps, self.shown, self.tty = steps, shown, sys.stdout.isatty()
        self.started = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        done, total = step - self.steps.start + 1, len(self.steps)
        if not self.shown:
            return
        pace = (time.monotonic() - self.started) / done
        text = f"step {step + 1:4d}  loss {loss:.4f}  {pace:.2f} s/step  {pace * (total - done):4.0f} s to go"
        if self.tty:
            bar = "█" * (30 * done // total)
            print(f"\r{bar:░<30} {text}", end="\n" if done == total else "", flush=True)
        elif done == 1 or done * 10 // total > (done - 1) * 10 // total:
            print(text, flush=True)


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Saves with torch.distributed.checkpoint, each rank its shards."""
    weights, state = get_state_dict(model, optimizer)
    writer = dcp.FileSystemWriter(directory, overwrite=True)
    dcp.save({"model": weights, "optimizer": state}, storage_writer=writer)


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Loads what save() saved, into a model and an optimizer of any layout."""
    weights, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def plot(losses: list[float], path: Path, title: str) -> None:
    """The loss curve as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    """One rank's run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "tpu"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    # The logits are only read.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)  # the ranks together have the cores
    dist.init_process_group(args.backend)
    first = dist.get_rank() == 0
    device = "tpu" if hasattr(torch, "tpu") else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh._flatten("dp_tp")  # so that the gradients' norm takes one all_reduce, not one per dimension
    shape = Shape()
    # A resumed run starts from other weights, so that only the checkpoint can make it go on as the first did.
    model = parallelize(Transformer(shape, seed=1 if args.resume else 0).to(device), mesh)
    if args.backend == "gloo":
        sum_gradients(model)
    optimizer = make_optimizer(model)
    text = load_text()
    half = args.steps // 2
    checkpoint, record = args.out / "checkpoint", args.out / "loss.json"

    if args.resume:
        steps = range(half, min(half + RESUMED_STEPS, args.steps))
        load(model, optimizer, checkpoint)
        losses = train(model, optimizer, mesh, text, shape, steps, Progress(steps, first))
        before = json.loads(record.read_text())[steps.start : steps.stop]
        apart = max(abs(a - b) for a, b in zip(losses, before, strict=True))
        ok = apart <= SAME
        verdict = f"resumed at step {half}: losses within {apart:.1e} of the first run's"
    else:
        if first:
            args.out.mkdir(parents=True, exist_ok=True)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            print(
                f"{args.backend} on {device}: {dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))} mesh, "
                f"{parameters:,} parameters, {len(text):,} bytes of text",
                flush=True,
            )
        progress = Progress(range(args.steps), first)
        losses = train(model, optimizer, mesh, text, shape, range(half), progress)
        save(model, optimizer, checkpoint)
        losses += train(model, optimizer, mesh, text, shape, range(half, args.steps), progress)
        start, end = losses[0], sum(losses[-10:]) / len(losses[-10:])
        ok = math.isfinite(end) and end < 0.6 * start
        verdict = f"loss {start:.3f} -> {end:.3f} nats per byte"
        if first:
            record.write_text(json.dumps(losses))
            plot(losses, args.out / "loss.png", f"{args.backend}: FSDP2 × TP on {dist.get_world_size()} ranks")
    if first:
        print(verdict if ok else f"FAILED: {verdict}", flush=True)
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
