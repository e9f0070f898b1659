from collections.abc import Sequence

__version__: str

# The C function table for faces (pg/torch/podring.h), as a PyCapsule.
abi: object

def cli_main(args: Sequence[str]) -> int: ...
