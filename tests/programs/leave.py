"""A rank that ends without destroy_process_group: `leave.py BACKEND INIT_METHOD HOW`.

HOW: idle, after a collective; small, with a small isend not waited for that rank 1 receives later; large, with a large
isend that nobody receives; irecv, with a receive that nothing will meet; async, with an all_reduce that rank 1 never
joins; code, by sys.exit(3).
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

backend, init_method, how = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=2, timeout=timedelta(seconds=60))
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0] * 3
if how == "small":
    if rank == 0:
        dist.isend(torch.full((7,), 5.0), 1)
    else:
        time.sleep(1.5)  # rank 0 is gone by now
        received = torch.zeros(7)
        dist.recv(received, 0)
        assert received.tolist() == [5.0] * 7
elif how == "large" and rank == 0:
    dist.isend(torch.ones(1 << 24), 1)
elif how == "irecv" and rank == 0:
    dist.irecv(torch.ones(4), 1)
elif how == "async" and rank == 0:
    dist.all_reduce(torch.ones(1 << 20), async_op=True)
print(f"rank {rank} leaves", flush=True)
if how == "code":
    sys.exit(3)
