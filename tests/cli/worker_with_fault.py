"""Stands in for the Python of `podring bench`: the real worker, with "tpu" played by gloo and a fault of choice.

    worker_with_fault.py -m MODULE [ARGS…]

FAULT (environment) is one of: none; corrupt (rank 0's all_reduce results have one wrong element); hang (rank 1 never
returns from its 20th all_reduce); raise (rank 1 raises in it).
"""

import os
import runpy
import sys
import threading

import torch
import torch.distributed as dist


def gloo_as_tpu(store: dist.Store, rank: int, size: int, timeout: object) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def with_fault(fault: str) -> None:
    rank = os.environ["RANK"]
    real = dist.all_reduce
    calls = 0

    def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        result = real(tensor, *args, **kwargs)
        if fault == "corrupt" and rank == "0":
            tensor[-1] += 1
        if rank == "1" and calls == 20:
            if fault == "hang":
                threading.Event().wait()
            if fault == "raise":
                raise RuntimeError("planted fault")
        return result

    dist.all_reduce = all_reduce


dist.Backend.register_backend("tpu", gloo_as_tpu, devices=["cpu"])
if "RANK" in os.environ:
    with_fault(os.environ.get("FAULT", "none"))
module = sys.argv[2]
sys.argv = sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
