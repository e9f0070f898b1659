from collections.abc import Sequence

__version__: str

# The C function table for faces (pg/torch/podring.h), as a PyCapsule.
abi: object

def cli_main(args: Sequence[str]) -> int: ...
def topology_devices(name: str | None, topology: str | None = None) -> list[tuple[int, list[int], int, int, int]]: ...
def topology_judge(
    name: str | None, topology: str | None, sizes: Sequence[int], ranks: Sequence[int], bytes: int = ...
) -> list[tuple[str, bool, float]]: ...
def topology_mesh(
    name: str | None,
    topology: str | None,
    sizes: Sequence[int],
    names: Sequence[str],
    traffic: Sequence[float] | None = None,
    talk: Sequence[str] | None = None,
    dcn: Sequence[tuple[str, int]] | None = None,
    bytes: int = ...,
) -> list[int]: ...
