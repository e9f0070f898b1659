"""Runs TorchTitan's trainer unchanged on CPU: what it needs of its surroundings is put right here, before its import.

- It asks torch which accelerator there is, and falls back to CUDA: the answer is "cpu".
- It has no option for the backend; it takes the device's default from c10d's map.
- torch.cpu lacks the memory queries that it prints.
"""

from __future__ import annotations

import os
import types
import typing

import torch
import torch._utils
import torch.distributed as dist


def main() -> None:
    """Prepares and trains; the command line is TorchTitan's."""
    backend = os.environ["TITAN_BACKEND"]
    dist.Backend._ensure_backend_registered(backend)
    dist.Backend.default_device_backend_map["cpu"] = backend
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = typing.cast(typing.Any, torch.cpu)
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(name="cpu", total_memory=memory)
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    torch.set_num_threads(1)
    if backend == "gloo":
        force_sums()

    from torchtitan.train import main as train

    train()


def force_sums() -> None:
    """For gloo, the yardstick, which has no PREMUL_SUM: FSDP2 divides by itself, as set_force_sum_reduction says."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original = FSDPParamGroup.__init__

    def init(self: FSDPParamGroup, *args: typing.Any, **kwargs: typing.Any) -> None:
        original(self, *args, **kwargs)
        self.force_sum_reduction_for_comms = True

    typing.cast(typing.Any, FSDPParamGroup).__init__ = init


if __name__ == "__main__":
    main()
