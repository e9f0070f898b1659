"""A rank of a job: `hello.py BACKEND INIT_METHOD`, rank and world size from the environment. Imports only torch."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

backend, init_method = sys.argv[1:]
ours = [name for name in sys.modules if name.split(".")[0] == "podring"]
assert not ours, f"imported with torch: {ours}"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timedelta(seconds=30))
tensor = torch.full((5,), float(rank + 1))
dist.all_reduce(tensor)
assert tensor.tolist() == [world * (world + 1) / 2] * 5, tensor
assert dist.get_backend() == backend
print(f"rank {rank} of {world}: right", flush=True)
if os.environ.get("LEAVE") != "without destroy":
    dist.destroy_process_group()
