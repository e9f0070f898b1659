"""One small network, its data, and what one process alone makes of them: what the scenarios compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WIDTH = 22
"""Rows of the weights shard unevenly over 4 ranks: 6, 6, 6, 4."""
CLASSES = 5


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def reset_parameters(self) -> None:
        """For modules made on the meta device."""


class Net(nn.Module):
    """Blocks and a head; the same weights wherever it is made."""

    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, size: int = 12, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and classes of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size, width, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain enough that a wrong gradient shows in the weights at its full size."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    net: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    part: int = 0,
    parts: int = 1,
    steps: int = 3,
    before_step: Callable[[], object] | None = None,
    start: int = 0,
) -> None:
    """Some steps on the part-th of `parts` of each batch. `before_step` runs when gradients are complete."""
    for step in range(start, start + steps):
        x, y = batch(step)
        F.cross_entropy(net(x.chunk(parts)[part]), y.chunk(parts)[part]).backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: Tensor) -> Tensor:
    """A tensor's whole value, wherever its shards are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(net: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name, without what wrappers add to the names."""
    with torch.no_grad():
        return {
            name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "").removeprefix("module."): full(p).clone()
            for name, p in net.named_parameters()
        }


def alone(steps: int = 3, clip: float | None = None) -> dict[str, Tensor]:
    """Whole batches, one process: the parameters after some steps."""
    net = Net()
    before = (lambda: nn.utils.clip_grad_norm_(net.parameters(), clip)) if clip is not None else None
    train(net, sgd(net.parameters()), steps=steps, before_step=before)
    return state(net)


def close(got: Tensor, want: Tensor, name: str, tolerance: float = 1e-5) -> None:
    """Equal to the tolerance, absolute and relative; else an error that says which tensor differs and where."""

    def message(text: str) -> str:
        return f"{name}: {text}"

    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=message)


def same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Equal names and, to the tolerance, equal values; and training has moved them."""
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], name, tolerance)
    begun = state(Net())
    assert any((got[name] - begun[name]).abs().max() > 2 * tolerance for name in begun if name in got)
