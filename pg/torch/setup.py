"""Builds the face against the torch at hand: ``pip install --no-build-isolation --no-deps ./pg/torch``."""

from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# c10d's binary interface changes with torch's minor version, so the module's name carries it.
MINOR = "_".join(torch.__version__.split(".")[:2])

setup(
    ext_modules=[
        CppExtension(
            f"podring_torch._face_{MINOR}",
            ["face.cpp"],
            depends=sorted(path.name for path in Path(__file__).parent.glob("*.h*")),
            # Symbols that stay inside aren't looked up in torch's libraries when init_process_group loads this.
            extra_compile_args=[
                *("-std=c++20", "-O2", "-g0", "-Wall", "-Wno-unknown-pragmas"),
                *("-fvisibility=hidden", "-fvisibility-inlines-hidden"),
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
