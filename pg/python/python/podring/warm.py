"""Compiling ahead: programs of collectives to come, before the first step waits for them.

Only where collectives run as programs (PODRING_ENGINE=ici, docs/ici.md); anywhere else there is nothing to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from podring import _register

__all__ = ["Call", "warm_up"]

Call: TypeAlias = tuple[str, torch.dtype, int] | tuple[str, torch.dtype, int, dist.ReduceOp.RedOpType]
"""Operation, element type, bytes, and for what reduces the operator (SUM unless given)."""

# PodringKind of pg/torch/podring.h. Gather's and scatter's programs depend on the root, messages have none.
_KINDS = {
    "all_reduce": 0,
    "broadcast": 1,
    "reduce": 2,
    "all_gather": 3,
    "all_gather_into_tensor": 3,
    "reduce_scatter": 4,
    "reduce_scatter_tensor": 4,
    "all_to_all": 5,
    "all_to_all_single": 5,
    "barrier": 8,
}


def warm_up(group: dist.ProcessGroup | None, calls: Sequence[Call]) -> int:
    """Compiles the programs that ``calls`` on ``group`` (None: the default group) will need; of how many it has them.

    ``warm_up(None, [("all_reduce", torch.bfloat16, 64 << 20), ("reduce_scatter", torch.bfloat16, 1 << 30)])``. Bytes
    are those of a rank's largest buffer, as in ``podring bench``: all_gather's output, reduce_scatter's input. One
    program serves all sizes of its class, so they need not be exact. Blocks that differ, and batches, have programs of
    their own.

    Every member calls it, with the same calls: each program is compiled by one and sent to the others. It waits for no
    collective of theirs. 0 where the group's collectives don't run as programs.

    Raises ValueError for a call that can't be, TypeError for a group of another backend.
    """
    asked = [_call(index, call) for index, call in enumerate(calls)]
    group = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"warm_up: expected a process group that this rank is in, got {group!r}")
    device = "tpu" if torch._C._get_privateuse1_backend_name() == "tpu" else "cpu"
    try:
        backend = group._get_backend(torch.device(device))
    except RuntimeError:
        raise TypeError(f"warm_up: the group has no backend for {device} tensors") from None
    face = _register.face()
    if not isinstance(backend, face.TpuBackend):
        raise TypeError(f'warm_up: expected a group of podring\'s backend "tpu", got one of {backend.name()!r}')
    return face.warm_up(backend, asked)


def _call(index: int, call: Call) -> tuple[int, torch.dtype, dist.ReduceOp, int]:
    def wrong(expected: str, got: object) -> ValueError:
        return ValueError(f"warm_up: call {index}: expected {expected}, got {got!r}")

    if not isinstance(call, tuple) or len(call) not in (3, 4):
        raise wrong("(operation, dtype, bytes) or (operation, dtype, bytes, reduce_op)", call)
    name, dtype, size = call[:3]
    if name not in _KINDS:
        raise wrong(f"one of {', '.join(_KINDS)}", name)
    if not isinstance(dtype, torch.dtype):
        raise wrong("a torch.dtype", dtype)
    if not isinstance(size, int) or not 0 <= size < 1 << 62:
        raise wrong("bytes, 0 or more", size)
    reduction = call[3] if len(call) == 4 else dist.ReduceOp.SUM
    if not isinstance(reduction, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        raise wrong("a torch.distributed.ReduceOp", reduction)
    return _KINDS[name], dtype, dist.ReduceOp(reduction), size
