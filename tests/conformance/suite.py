"""Torch's shipped distributed_test at one world size and one backend name; writes one JSON file.

Run as a program, one process per (backend, name, world size): the suite reads both from the environment on import.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests import processes
from tests.conformance import ranks


def main() -> int:
    """Runs the suite as the command line says; 0 whatever the tests did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True, help="the backend under test")
    parser.add_argument("--name", required=True, help="the name the suite sees it under")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tests", type=Path, help="JSON list of test names; default: all")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per test")
    parser.add_argument("--jobs", type=int, default=2, help="tests at once")
    args = parser.parse_args()

    os.environ.update(BACKEND=args.name, WORLD_SIZE=str(args.world_size), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    os.environ.setdefault("TEMP_DIR", "/nonexistent")  # each test's ranks get their own
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch
    import torch._dynamo  # optimizers import it on first use, in every rank anew
    import torch.distributed as dist

    dist.Backend._ensure_backend_registered(args.backend)
    if args.name != args.backend:
        register_under(args.backend, args.name)

    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Suite(TestDistBackend, DistributedTest._DistTestBase):
        pass

    skip_codes = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}

    def rank_main(rank: int, name: str, directory: Path, pipe: processes.Connection) -> None:
        torch.set_num_threads(1)
        os.environ["TEMP_DIR"] = str(directory)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        for sub in ("barrier", "test_dir", "init_dir"):
            (directory / sub).mkdir(exist_ok=True)
        os.environ["INIT_METHOD"] = f"file://{directory}/init_dir/shared_init_file"
        Suite._run(rank, name, str(directory / "store"), pipe)

    def judge(test: ranks.Running) -> ranks.Result:
        seconds = round(time.monotonic() - test.started, 2)
        codes = [rank.exit_code for rank in test.ranks]
        if test.timed_out:
            return ranks.Result("timeout", seconds, test.describe())
        if all(code == 0 for code in codes):
            return ranks.Result("passed", seconds)
        # As in torch's own runner, the first rank says whether the test was skipped.
        if codes[0] in skip_codes and not any(code in (1, 10) or (code or 0) < 0 for code in codes):
            return ranks.Result("skipped", seconds, skip_codes[codes[0]])
        return ranks.Result("failed", seconds, test.describe())

    results: dict[str, ranks.Result] = {}
    chosen = json.loads(args.tests.read_text()) if args.tests else None
    names = []
    for name in sorted(dir(Suite)):
        method = getattr(Suite, name)
        if not name.startswith("test_") or not callable(method):
            continue
        if chosen is not None and name not in chosen:
            continue
        if getattr(method, "__unittest_skip__", False):
            results[name] = ranks.Result("skipped", 0.0, str(getattr(method, "__unittest_skip_why__", "")))
        else:
            names.append(name)
    if chosen is not None:
        for name in sorted(set(chosen) - set(results) - set(names)):
            results[name] = ranks.Result("failed", 0.0, "no such test in this torch")

    started = time.monotonic()
    total = len(names)
    for done, (name, result) in enumerate(
        ranks.run_all(names, args.world_size, rank_main, judge, args.limit, args.jobs), start=1
    ):
        results[name] = result
        if result.outcome in ("failed", "timeout"):
            print(f"  {result.outcome}: {name} ({result.seconds} s)", flush=True)
        elif done % 25 == 0 or done == total:
            print(f"  {done}/{total} at {time.monotonic() - started:.0f} s", flush=True)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "torch": torch.__version__.split("+")[0],
        "backend": args.backend,
        "name": args.name,
        "world_size": args.world_size,
        "seconds": round(time.monotonic() - started, 1),
        "tests": {name: vars(results[name]) for name in sorted(results)},
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def register_under(backend: str, name: str) -> None:
    """Registers `backend` a second time, as `name`: some 25 of the suite's tests run only for names they know."""
    if backend == "tpu":
        from podring import _register

        _register.register(name)  # it names the profiler's rows
        return
    import torch.distributed as dist

    plugin = dist.Backend._plugins[backend.upper()]
    dist.Backend.register_backend(name, plugin.creator_fn, extended_api=plugin.extended_api, devices=["cpu"])


if __name__ == "__main__":
    sys.exit(main())
