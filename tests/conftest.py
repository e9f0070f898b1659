"""Loads, once, what the forked ranks need: DDP, FSDP2 and the optimizers each import torch._dynamo, for seconds."""

from __future__ import annotations

import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

from tests import harness

if harness.BACKEND == "tpu":
    import podring._register  # noqa: F401

# A warning, not an error, if there is no such backend: each test then says so.
dist.Backend._ensure_backend_registered(harness.BACKEND)
