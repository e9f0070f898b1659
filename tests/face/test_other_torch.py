"""The face's source compiles against the torch before the one it is built with here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = "2.14.1"


def headers(version: str) -> Path:
    """That torch's headers, from its wheel, kept under out/."""
    place = ROOT / "out" / f"torch-{version}"
    if place.exists():
        return place / "torch" / "include"
    partial = place.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(partial), f"torch=={version}"]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if name.startswith("torch/include/")])
    wheel.unlink()
    partial.rename(place)
    return place / "torch" / "include"


def test_compiles_against_the_torch_before() -> None:
    include = headers(VERSION)
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Wno-unknown-pragmas"]
    command += ["-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=_face", f"-I{sysconfig.get_paths()['include']}"]
    command += ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]
    command += [str(ROOT / "pg" / "torch" / "face.cpp")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
