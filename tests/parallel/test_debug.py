"""What watches training: the profiler's rows, and TORCH_DISTRIBUTED_DEBUG=DETAIL."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from tests.harness import BACKEND, attempt, new_group, run
from tests.parallel.model import Net, alone, same, sgd, state, train
from tests.parallel.world import World


def profiled() -> dict[str, list[Any]]:
    group = new_group([0, 1], group_desc="watched")
    rank = dist.get_rank()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof, record_function("## step ##"):
        tensor = torch.ones(3, 5)
        dist.all_reduce(tensor)
        work = dist.all_reduce(torch.ones(7), group=group, async_op=True)
        out = torch.zeros(8)
        dist.all_gather_into_tensor(out, torch.full((4,), float(rank)))
        dist.broadcast(torch.ones(2), 0)
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4))
        if rank == 0:
            dist.send(torch.ones(6), 1)
        else:
            dist.recv(torch.ones(6), 0)
        dist.barrier()
        assert work is not None
        work.wait()
    # Profiling changes no number.
    assert tensor.tolist() == [[2.0] * 5] * 3
    assert out.tolist() == [0.0] * 4 + [1.0] * 4
    rows: dict[str, list[Any]] = {}
    for event in prof.events():
        if event.name.startswith(f"{BACKEND}:"):
            rows.setdefault(event.name, []).append(event.input_shapes)
            assert event.cpu_time_total >= 0
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory) / "trace.json"
        prof.export_chrome_trace(str(where))
        trace = json.loads(where.read_text())["traceEvents"]
    comms = [event["args"] for event in trace if event.get("name") == "record_param_comms"]
    rows["record_param_comms"] = [
        (args["Collective name"], args["In msg nelems"], args["Out msg nelems"], args["Group size"], args["dtype"])
        for args in comms
    ]
    rows["descriptions"] = sorted({args["Process Group Description"] for args in comms})
    return rows


def test_profiler_rows(two: World) -> None:
    """One row per operation with its tensors' shapes, and record_param_comms with names, sizes and groups: against what
    the scenario called."""
    for rank, rows in enumerate(two.run(profiled)):
        assert rows[f"{BACKEND}:all_reduce"] == [[[3, 5]], [[7]]]
        assert rows[f"{BACKEND}:all_gather_into_tensor"] == [[[4]]]
        assert rows[f"{BACKEND}:broadcast"] == [[[2]]]
        assert rows[f"{BACKEND}:reduce_scatter_tensor"] == [[[4]]]
        assert rows[f"{BACKEND}:{'recv' if rank else 'send'}"] == [[[6]]]
        assert len(rows[f"{BACKEND}:barrier"]) == 1
        comms = rows["record_param_comms"]
        assert ("all_reduce", 15, 15, 2, "Float") in comms
        assert ("all_reduce", 7, 7, 2, "Float") in comms
        assert ("all_gather_into_tensor", 4, 8, 2, "Float") in comms
        assert ("reduce_scatter_tensor", 4, 2, 2, "Float") in comms
        assert "watched" in rows["descriptions"]


DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def detailed() -> None:
    dist.set_debug_level_from_env()
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{os.environ['STORE_FILE']}",
        rank=int(os.environ["RANK"]),
        world_size=2,
    )
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    rank, group = dist.get_rank(), new_group([0, 1])
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0] * 3
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    net = DistributedDataParallel(Net())
    train(net, sgd(net.parameters()), rank, 2)
    same(state(net), alone())
    dist.destroy_process_group()


def test_detail() -> None:
    """DETAIL's wrapper around the group: a subgroup's sum, objects, and DDP's parameters against one process's."""
    run(detailed, 2, init=False, env=DETAIL)


def disagreeing() -> None:
    dist.set_debug_level_from_env()
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{os.environ['STORE_FILE']}",
        rank=int(os.environ["RANK"]),
        world_size=2,
    )
    dist.all_reduce(torch.ones(3 if dist.get_rank() == 0 else 4))


def test_detail_finds_a_mismatch() -> None:
    """DETAIL compares shapes before the collective: both ranks get the error that says so."""
    for end in attempt(disagreeing, 2, init=False, env=DETAIL, timeout=30):
        assert end.error is not None and end.error.is_a("RuntimeError"), end
        assert "Detected mismatch between collectives on ranks" in end.error.message, end.error.message
        assert "shapes: 3vs 4" in end.error.message or "shapes: 4vs 3" in end.error.message, end.error.message
