"""restart.py BACKEND: rank 1 dies in its first life, after the group was formed; all are well in the second."""

import os
import sys

import torch
import torch.distributed as dist

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group(sys.argv[1])
tensor = torch.ones(1)
dist.all_reduce(tensor)
if life == 0 and dist.get_rank() == 1:
    os.abort()
dist.barrier()
print(f"life {life}: {'right' if tensor.item() == dist.get_world_size() else 'wrong'}", flush=True)
dist.destroy_process_group()
