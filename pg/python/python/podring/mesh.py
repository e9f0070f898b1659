"""Meshes laid over a TPU slice so that the axes that talk most get the best links.

``device_mesh`` is ``torch.distributed.device_mesh.init_device_mesh`` with the slice taken into account: the same shape
and names, but ranks stand where the links are. ``rank_order`` gives the order alone and needs no torch.

Rank r is the r-th device in libtpu's list, which goes process by process: the ranks that a launcher gives with
``process * devices_per_process + local``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podring import _core

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["device_mesh", "rank_order"]


def rank_order(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    slice: str | None = None,
    topology: str | None = None,
    traffic: Mapping[str, float] | None = None,
    talk: Mapping[str, str] | None = None,
    dcn: Mapping[str, int] | None = None,
    bytes: int = 64 << 20,
) -> list[int]:
    """Ranks of a mesh of ``shape``, row-major: the last axis is the fastest.

    ``slice`` is a name ("v5p:4x4x8", "v5litepod-16", "v5e:4x4*2"); without it TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY say
    which. ``traffic`` is how much axes talk relative to each other (default: each four times the one before it, the
    last most); ``talk`` what they run ("allreduce" by default, "all-to-all" for experts); ``dcn`` along which axes
    several slices lie (default: as far out as they fit); ``bytes`` the size of a collective.

    Raises ValueError if the slice or the mesh can't be; the message names the nearest valid choices.
    """
    if slice is None and topology is None:
        slice = os.environ.get("TPU_ACCELERATOR_TYPE")
        topology = os.environ.get("TPU_TOPOLOGY")
        if not slice and not topology:
            raise ValueError(
                'which slice? Give slice="v5p:4x4x8" or set TPU_ACCELERATOR_TYPE or TPU_TOPOLOGY; none is set'
            )
    axis_names = [f"axis{index}" for index in range(len(shape))] if names is None else list(names)
    for what, given in (("traffic", traffic), ("talk", talk)):
        unknown = [name for name in given or {} if name not in axis_names]
        if unknown:
            raise ValueError(f"{what}: no mesh axis {unknown[0]!r}; the axes are {', '.join(axis_names)}")
    weights = None
    if traffic is not None:
        weights = [float(traffic.get(name, 1.0)) for name in axis_names]
    collectives = None
    if talk is not None:
        collectives = [talk.get(name, "allreduce") for name in axis_names]
    return _core.topology_mesh(
        slice,
        topology,
        [int(size) for size in shape],
        axis_names,
        weights,
        collectives,
        None if dcn is None else list(dcn.items()),
        bytes,
    )


def device_mesh(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    slice: str | None = None,
    topology: str | None = None,
    traffic: Mapping[str, float] | None = None,
    talk: Mapping[str, str] | None = None,
    dcn: Mapping[str, int] | None = None,
    bytes: int = 64 << 20,
    device_type: str = "tpu",
    **kwargs: Any,
) -> DeviceMesh:
    """A ``DeviceMesh`` of ``shape`` over the slice; arguments as for ``rank_order``, the rest goes to ``DeviceMesh``.

    Every rank calls it with the same arguments, as with ``init_device_mesh``. The world must have one rank per device
    of the slice.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    order = rank_order(shape, names, slice=slice, topology=topology, traffic=traffic, talk=talk, dcn=dcn, bytes=bytes)
    if dist.is_initialized() and dist.get_world_size() != math.prod(shape):
        raise ValueError(f"the slice has {len(order)} devices but the world has {dist.get_world_size()} ranks")
    ranks = torch.tensor(order, dtype=torch.int).reshape(tuple(shape))
    return DeviceMesh(device_type, ranks, mesh_dim_names=None if names is None else tuple(names), **kwargs)
