"""tpu_url.py BACKEND URL [query]: a job over init_method=URL, with nothing of podring's imported."""

import os
import sys

import torch
import torch.distributed as dist

backend, url, *how = sys.argv[1:]
if how:
    # Not from the environment.
    rank, world_size = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE"))
if how == ["query"]:
    dist.init_process_group(backend, init_method=f"{url}?rank={rank}&world_size={world_size}")
elif how == ["arguments"]:
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size)
else:
    dist.init_process_group(backend, init_method=url)
for _ in range(2):
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    world_size = dist.get_world_size()
    assert tensor.tolist() == [world_size * (world_size + 1) / 2] * 3, tensor
    dist.barrier()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: right", flush=True)
dist.destroy_process_group()
