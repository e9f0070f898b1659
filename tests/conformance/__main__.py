"""Holds a backend against torch's shipped distributed suite, with what gloo passes as the yardstick.

    python -m tests.conformance --backend tpu --names tpu,gloo --world-sizes 2,3,4
    python -m tests.conformance --pin            # makes gloo_pass_N.json anew, with real gloo

Ends with exit code 1 if a test that gloo passes does not pass, but for the cases in exceptions.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = ("gloo", "tpu")
"""The names pinned: under another name than its own some of the suite's tests skip, for gloo as for anybody."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=os.environ.get("PODRING_TEST_BACKEND", "tpu"))
    parser.add_argument("--names", default="tpu,gloo", help="names the suite sees the backend under")
    parser.add_argument("--world-sizes", default="2,3,4")
    parser.add_argument("--pinned", action="store_true", help="only the tests that gloo passes")
    parser.add_argument("--pin", action="store_true", help="write gloo's pass lists instead of comparing with them")
    parser.add_argument("--jobs", type=int, default=3, help="tests at once; most of a test is waiting")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per test")
    parser.add_argument("--total-limit", type=float, default=1500.0, help="seconds per world size and name")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "conformance")
    args = parser.parse_args()
    if args.pin:
        args.backend, args.names = "gloo", ",".join(NAMES)

    missing = 0
    for world_size in map(int, args.world_sizes.split(",")):
        pinned_file = HERE / f"gloo_pass_{world_size}.json"
        pinned: dict[str, Any] = {} if args.pin else json.loads(pinned_file.read_text())
        for name in args.names.split(","):
            print(f"{args.backend} as {name}, {world_size} ranks", flush=True)
            document = run(args, name, world_size, pinned.get(name) if args.pinned else None)
            tests = document["tests"]
            if args.pin:
                bad = [test for test, result in tests.items() if result["outcome"] in ("failed", "timeout")]
                for test in bad:
                    print(f"  not pinned, {tests[test]['outcome']}: {test}: {reason(tests[test]['detail'])}")
                pinned["torch"] = document["torch"]
                pinned[name] = [test for test, result in tests.items() if result["outcome"] == "passed"]
                print(f"  {len(pinned[name])} passed, {len(bad)} failed, {document['seconds']} s", flush=True)
            else:
                missing += compare(document, pinned)
        if args.pin:
            pinned_file.write_text(json.dumps(pinned, indent=1) + "\n")
    print("conformance: " + (f"{missing} missing" if missing else "nothing missing"), flush=True)
    return int(missing > 0)


def run(args: argparse.Namespace, name: str, world_size: int, tests: list[str] | None) -> dict[str, Any]:
    """One run of the suite in a process of its own; gives its document."""
    out = args.out / f"{args.backend}_as_{name}_{world_size}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.conformance.suite", "--backend", args.backend, "--name", name]
    command += ["--world-size", str(world_size), "--out", str(out)]
    command += ["--jobs", str(args.jobs), "--limit", str(args.limit)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as chosen:
        if tests is not None:
            json.dump(tests, chosen)
            chosen.flush()
            command += ["--tests", chosen.name]
        subprocess.run(command, cwd=ROOT, check=True, timeout=args.total_limit)
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def compare(document: dict[str, Any], pinned: dict[str, Any]) -> int:
    """Prints what gloo passes and this run does not; gives how many, exceptions apart."""
    tests, name = document["tests"], document["name"]
    if document["torch"] != pinned["torch"]:
        print(f"  note: pinned with torch {pinned['torch']}, run with {document['torch']}")
    exceptions = json.loads((HERE / "exceptions.json").read_text()).get(name, {})
    wanted = pinned[name]
    missing = [test for test in wanted if tests.get(test, {}).get("outcome") != "passed"]
    excused = [test for test in missing if test in exceptions and tests[test]["outcome"] == "failed"]
    missing = [test for test in missing if test not in excused]
    for test in missing:
        result = tests.get(test, {"outcome": "absent", "detail": ""})
        print(f"  MISSING, {result['outcome']}: {test}: {reason(result['detail'])}")
    for test in excused:
        print(f"  excepted: {test}: {exceptions[test]}")
    # What gloo skips or fails and this backend fails is worth a look too, though gloo is the yardstick.
    wanted_set = set(wanted)
    for test, result in tests.items():
        if test not in wanted_set and test not in exceptions and result["outcome"] in ("failed", "timeout"):
            print(f"  beyond gloo, {result['outcome']}: {test}")
    passed = len(wanted) - len(missing) - len(excused)
    print(f"  {passed} of gloo's {len(wanted)} pass, {document['seconds']} s", flush=True)
    return len(missing)


def reason(detail: str) -> str:
    """The first exception's line of a detail, and the next two if there are; all of it is in the JSON file."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Warning)\b.*:", line)), 0)
    return " ".join(lines[first : first + 3])[:300]


if __name__ == "__main__":
    sys.exit(main())
