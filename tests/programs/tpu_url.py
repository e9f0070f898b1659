"""tpu_url.py BACKEND URL URL URL: three jobs over init_method=URL, with nothing of podring's imported.

Rank and world size come from the environment, then from the query, then from the arguments.
"""

import os
import sys

import torch
import torch.distributed as dist

backend, *urls = sys.argv[1:]
first, second, third = urls


def use(how: str) -> None:
    """Uses the group and ends it."""
    for _ in range(2):
        tensor = torch.full((3,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        world_size = dist.get_world_size()
        assert tensor.tolist() == [world_size * (world_size + 1) / 2] * 3, tensor
        dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {how}: right", flush=True)
    dist.destroy_process_group()


dist.init_process_group(backend, init_method=first)
use("environment")
rank, world_size = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE"))
dist.init_process_group(backend, init_method=f"{second}?rank={rank}&world_size={world_size}")
use("query")
dist.init_process_group(backend, init_method=third, rank=rank, world_size=world_size)
use("arguments")
