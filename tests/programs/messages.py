"""A job whose ranks ask for different messages: `messages.py FOLDER`; prints what each said, as JSON.

A program of its own, since a process settles what it shows once, also for its forked children.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import harness  # noqa: E402

# The launcher counts this host as another one than the slice does.
SLICE = {"GROUP_RANK": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}
ASKED = ["", "off", "info", "loud", "debug", "debug"]
BROKEN, CLOSED = 4, 5
"""A rank with a stderr that nobody reads, and one that has none."""
folder = Path(sys.argv[1])


def body() -> float:
    """One sum, and a message of a Python module."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(folder / f"stdout{rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.environ["LOCAL_RANK"] = "0"
    if rank == CLOSED:
        os.close(2)
    elif rank == BROKEN:
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(reader)
    dist.init_process_group(
        harness.BACKEND,
        init_method=f"file://{os.environ['STORE_FILE']}",
        rank=rank,
        world_size=len(ASKED),
        timeout=timedelta(seconds=30),
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    from podring import _graphs

    _graphs._log_as_asked()
    _graphs.log.info("what Python says of %d graphs", 2)
    dist.destroy_process_group()
    return tensor[0].item()


asked: harness.RankEnv = lambda rank: {"PODRING_LOG": ASKED[rank]} if rank else {}  # noqa: E731
ends = harness.attempt(body, len(ASKED), init=False, env=SLICE, rank_env=asked)
rows = [[end.value, end.output, (folder / f"stdout{end.rank}").read_text()] for end in ends]
print(json.dumps(rows))
