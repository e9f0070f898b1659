"""init_method="tpu://host:port"."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import podring
import pytest
import torch.distributed as dist
from podring.store import Credentials
from torch.distributed import rendezvous as torchs_rendezvous

from tests import harness
from tests.rendezvous import servers
from tests.rendezvous.servers import HOST, AnyStore, server


def rendezvous(url: str, seconds: float = 20) -> tuple[AnyStore, int, int]:
    """The store, and rank and world size."""
    return next(torchs_rendezvous(url, timeout=timedelta(seconds=seconds)))


def test_jobs_form_with_nothing_of_ours_imported() -> None:
    """Rank and world size from the environment, the query, the arguments."""
    urls = [f"tpu://{HOST}:{harness.free_port()}" for _ in range(3)]
    for rank, ended in enumerate(harness.run_job("tpu_url.py", 2, *urls)):
        for how in ("environment", "query", "arguments"):
            assert ended.code == 0 and f"rank {rank} of 2, {how}: right" in ended.output, ended.output


def test_other_backends_over_it() -> None:
    """It is a plain store. Twice the same URL: one job after the other."""
    port = harness.free_port()

    def body() -> float:
        import torch

        total = 0.0
        for turn in range(2):
            dist.init_process_group("gloo", init_method=f"tpu://localhost:{port}")
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            total += tensor.item()
            dist.barrier()
            dist.destroy_process_group()
            # The first job's store ends with rank 0's group; nobody should come to it for the second.
            over = Path(f"{os.environ['STORE_FILE']}.{turn}")
            if os.environ["RANK"] == "0":
                gc.collect()
                over.touch()
            until = time.monotonic() + 20
            while not over.exists() and time.monotonic() < until:
                time.sleep(0.01)
        return total

    assert harness.run(body, 3, init=False) == [6.0] * 3


def test_a_standing_coordinator_is_used(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-of-the-job")
    with server("podring", token=token.read_text()) as one:

        def body() -> int:
            dist.init_process_group("gloo", init_method=f"tpu://{HOST}:{one.port}")
            dist.barrier()
            dist.destroy_process_group()
            return dist.get_rank() if dist.is_initialized() else -1

        env = {"PODRING_TOKEN_FILE": str(token)}
        assert harness.run(body, 2, init=False, env=env) == [-1, -1]
        # The ranks are gone, and what they wrote is with the coordinator still.
        assert one.client().num_keys() > 0


def test_rank_0_serves_once_the_port_is_free() -> None:
    """Whoever has the port leaves, as a coordinator of the job before may: rank 0 doesn't wait for it for ever."""
    with socket.socket() as leaving:
        leaving.bind((HOST, 0))
        leaving.listen()
        timer = threading.Timer(2, leaving.close)
        timer.start()
        url = f"tpu://{HOST}:{leaving.getsockname()[1]}?rank=0&world_size=1"
        store, _, _ = rendezvous(url, seconds=20)
        store.set("key", "value")
        assert store.get("key") == b"value"
        timer.join()


def test_ipv6() -> None:
    port = harness.free_port()

    def body() -> int:
        store, rank, world_size = rendezvous(f"tpu://[::1]:{port}")
        came = int(store.add("sum", 1))
        store.set(f"rank{rank}", "")
        # The coordinator ends with rank 0's store.
        if rank == 0:
            store.wait([f"rank{other}" for other in range(world_size)])
        return came

    assert sorted(harness.run(body, 2, init=False)) == [1, 2]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tpu://localhost", "expected tpu://host:port"),
        ("tpu://localhost:0", "expected tpu://host:port"),
        ("tpu://:29400", "expected tpu://host:port"),
        ("tpu://localhost:1?rank=0", "no world_size"),
        ("tpu://localhost:1?world_size=2", "no rank"),
        ("tpu://localhost:1?rank=two&world_size=2", "rank: expected a number"),
        ("tpu://localhost:1?rank=2&world_size=2", "got rank 2 of 2"),
        ("tpu://localhost:1?rank=-1&world_size=2", "got rank -1 of 2"),
        ("tpu://localhost:1?rank=0&world_size=1&tokenfile=x", "unknown"),
        ("tpu://localhost:1?rank=0&world_size=1&token_file=/nonexistent/token", "/nonexistent/token"),
        ("tpu://0.0.0.0:29400?rank=0&world_size=1", "PODRING_TOKEN_FILE"),
    ],
)
def test_what_is_wrong_is_said(url: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=expected):
        rendezvous(url)


def test_nobody_comes() -> None:
    """A rank whose rank 0 never comes."""
    url = f"tpu://{HOST}:{harness.free_port()}?rank=1&world_size=2"
    with pytest.raises(dist.DistNetworkError, match="no coordinator at"):
        rendezvous(url, 1)


def test_beyond_this_host_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-of-the-job")
    port = harness.free_port()

    def body() -> tuple[bool, str]:
        url = f"tpu://0.0.0.0:{port}?rank=0&world_size=1&token_file={token}"
        store, _, _ = rendezvous(url)
        with pytest.raises(dist.DistStoreError) as caught:
            podring.Store(HOST, port, timeout=timedelta(seconds=5), credentials=Credentials())
        return store.serves, str(caught.value)

    serves, text = servers.end(servers.run(body))
    assert serves and "no token given" in text


def test_import_torch_stays_light(tmp_path: Path) -> None:
    """The hook makes scheme and backend known, and loads neither the core nor anything of torch's that wasn't."""
    hooked = (
        "import torch, sys; r = sys.modules['torch.distributed.rendezvous'];"
        "assert 'tpu' in r._rendezvous_handlers;"
        "assert 'podring._core' not in sys.modules and 'podring_torch' not in sys.modules;"
        "assert torch.distributed.Backend.backend_capability['tpu'] == ['cpu'];"
        "import podring; assert podring.__version__; print('light')"
    )
    # Without torch's hooks it can be had by hand.
    by_hand = (
        "import torch, sys, podring.rendezvous; r = sys.modules['torch.distributed.rendezvous'];"
        "assert 'tpu' not in r._rendezvous_handlers; podring.rendezvous.register();"
        "assert 'tpu' in r._rendezvous_handlers;"
        "backend = torch.distributed.Backend; assert 'TPU' not in backend._plugins;"
        "assert torch.distributed.is_backend_available('tpu'); print('by hand')"
    )
    # Beside torch_tpu it is looked for when it is asked for.
    beside = (
        "import torch; backend = torch.distributed.Backend; assert 'TPU' not in backend._plugins;"
        "assert torch.distributed.is_backend_available('tpu'); print('beside')"
    )
    (tmp_path / "torch_tpu").mkdir()
    (tmp_path / "torch_tpu" / "__init__.py").touch()
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    theirs = {"PYTHONPATH": str(tmp_path)}
    programs: list[tuple[str, str, dict[str, str]]] = [
        (hooked, "light", {}),
        (by_hand, "by hand", off),
        (beside, "beside", theirs),
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        for program, _, env in programs
    ]
    for process, (_, says, _) in zip(running, programs, strict=True):
        out, err = process.communicate(timeout=60)
        assert out.strip() == says, err
