"""TorchTitan's debug model on a backend: `python -m tests.titan --backend tpu`. Exit code 1 unless the loss falls.

The ranks train on CPU through torchrun, or, with `--device tpu`, on virtual chips through `podring run`, then with
TorchTitan's own module untouched. The first rank's log is shown, and kept in out/titan/.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from tests.processes import run_program
from tests.titan import assets

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.titan")
    parser.add_argument("--backend", default=os.environ.get("PODRING_TEST_BACKEND", "tpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "tpu"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="with --device tpu: layers compiled by torch_tpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    args = parser.parse_args()

    out = ROOT / "out" / "titan"
    assets.make(out)
    tp = args.tensor_parallel
    if args.device == "tpu":
        virtual = ROOT / ".venv-vchip/bin/python"
        command = [str(virtual), "-m", "podring", "run", "--slice", f"v5e:1x{args.ranks}", "-m", "torchtitan.train"]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        command += ["-m", "tests.titan.launch"]
    if args.compile:
        command += ["--compile.enable", "--compile.backend", "tpu"]
    command += ["--module", "tests.titan.config", "--config", "cpu_debug"]
    command += ["--training.steps", str(args.steps), "--training.seq_len", "128", "--training.local_batch_size", "2"]
    command += ["--parallelism.data_parallel_shard_degree", str(args.ranks // tp)]
    command += ["--parallelism.tensor_parallel_degree", str(tp), "--dump_folder", str(out / "dump")]
    env = {
        "TITAN_BACKEND": args.backend,
        "TITAN_ASSETS": str(out),
        "HF_HOME": str(out / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    program = run_program(command, timeout=args.limit, env=env, cwd=ROOT)
    (out / "log.txt").write_text(program.output)
    # Each rank logs every step, with colour codes between the words.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", program.output)
    steps: dict[int, float] = {}
    for step, loss in re.findall(r"step:\s+(\d+)\s+loss:\s+([0-9.]+)", plain):
        steps.setdefault(int(step), float(loss))
    for step, loss in sorted(steps.items()):
        print(f"step {step}  loss {loss:.4f}")
    losses = [steps[step] for step in sorted(steps)]
    ok = program.code == 0 and len(losses) == args.steps and losses[-1] < losses[0]
    if not ok:
        print(plain[-6000:])
    ended = "over its bound" if program.code is None else f"exit code {program.code}"
    print(
        f"TorchTitan debug model on {args.backend}, {args.ranks} ranks, tensor parallel {tp}: "
        f"{'falling loss' if ok else 'FAILED'}, {ended}, {program.seconds:.0f} s"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
