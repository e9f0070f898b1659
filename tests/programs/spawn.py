"""A job that starts its ranks with torch.multiprocessing: `spawn.py BACKEND PORT`."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank: int, backend: str, port: str) -> None:
    """One rank."""
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor)
    assert tensor.item() == 3
    print(f"rank {rank} of 2: right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, args=(sys.argv[1], sys.argv[2]), nprocs=2)
