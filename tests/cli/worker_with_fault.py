"""Stands in for the Python of `podring bench`: the real worker, with "tpu" played by gloo and a fault of choice.

    worker_with_fault.py {-m MODULE [ARGS…] | -c CODE}

FAULT (environment) is one of: none; corrupt (rank 0's all_reduce results have one wrong element); hang (rank 1 never
returns from its 20th all_reduce); raise (rank 1 raises in it).
"""

import os
import runpy
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def gloo_as_tpu(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def with_fault(fault: str) -> None:
    rank = os.environ["RANK"]
    real: Any = dist.all_reduce
    calls = 0

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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

    setattr(dist, "all_reduce", all_reduce)  # noqa: B010 - mypy would compare it with torch's overloads


dist.Backend.register_backend("tpu", gloo_as_tpu, devices=["cpu"])
if "RANK" in os.environ:
    with_fault(os.environ.get("FAULT", "none"))
if sys.argv[1] == "-c":
    exec(sys.argv[2])
else:
    sys.argv = sys.argv[2:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except RuntimeError:
        # Out at once: gloo, torn down with operations under way, sometimes aborts the process instead.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
