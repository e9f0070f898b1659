"""Loads what the forked ranks need, once."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

from tests import harness

# A warning, not an error, if there is no such backend: each test then says so.
dist.Backend._ensure_backend_registered(harness.BACKEND)
