"""elastic.py BACKEND DIRECTORY: a small model trained under torchrun, from the last checkpoint on.

Every rank takes its share of the same samples, so a step's gradient is the same for any number of ranks. The program
writes its pid and a line per life into DIRECTORY, and holds after step 10 for as long as there is DIRECTORY/hold.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS, HOLD, SAMPLES = 30, 10, 12

backend, directory = sys.argv[1], Path(sys.argv[2])
agent = os.environ["AGENT"]
(directory / f"{agent}.pid").write_text(str(os.getpid()))
dist.init_process_group(backend)
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.set_num_threads(1)
torch.manual_seed(1)
inputs, targets = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
# SGD with momentum, as torch.optim's, which would import torch._dynamo: seconds for each life of each worker.
LR, MOMENTUM = 0.1, 0.5
momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
checkpoint = directory / "checkpoint.pt"
# What rank 0 sees goes for all: the file may change between two looks.
begun = [torch.load(checkpoint, weights_only=True) if rank == 0 and checkpoint.exists() else None]
dist.broadcast_object_list(begun)
step = 0
if begun[0] is not None:
    step = begun[0]["step"]
    model.load_state_dict(begun[0]["model"])
    momenta = begun[0]["momenta"]
base = dist.distributed_c10d._get_default_store()
while isinstance(base, dist.PrefixStore):
    base = base.underlying_store
with open(directory / "lives", "a") as lives:
    lives.write(f"{agent} {rank} {world_size} {step} {type(base).__module__}.{type(base).__qualname__}\n")

while step < STEPS:
    model.zero_grad()
    loss = ((model(inputs[rank::world_size]) - targets[rank::world_size]) ** 2).sum() / SAMPLES
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    with torch.no_grad():
        for parameter, momentum in zip(model.parameters(), momenta, strict=True):
            assert parameter.grad is not None
            momentum.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(LR * momentum)
    step += 1
    if rank == 0:
        torch.save({"step": step, "model": model.state_dict(), "momenta": momenta}, directory / "writing")
        os.replace(directory / "writing", checkpoint)
    while True:
        # What rank 0 sees goes for all; a rank that dies meanwhile is noticed.
        hold = torch.tensor([int((directory / "hold").exists() and step >= HOLD)])
        dist.broadcast(hold, 0)
        if not hold.item():
            break
        (directory / f"{agent}.held").write_text(str(world_size))
        time.sleep(0.05)

(directory / f"{agent}.loss").write_text(repr(loss.item()))
dist.destroy_process_group()
