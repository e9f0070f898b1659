"""Where torch_tpu and a machine with no TPU, or torch_tpu and a process group not its own, don't fit: one function for
each fact, with its reason and the versions it was seen with. torch_tpu's own files are untouched.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable
from typing import Any

SEEN_WITH = ("0.2.0",)
"""The versions of torch_tpu that all of this was tried with."""


def before_start_on_tpu() -> None:
    """What has to be so before PJRT starts on a TPU host."""
    launch_environment_on_tpu()


def before_start_on_virtual_slice(slice_name: str) -> None:
    """What has to be so before PJRT starts on a virtual slice."""
    launch_environment(slice_name)
    disk_cache()


def after_start_on_virtual_slice(slice_name: str) -> None:
    """What has to be so before user code runs on a virtual slice, and is right on a TPU."""
    hardware(slice_name)
    attention()
    exit_barrier()


def after_start() -> None:
    """What torch_tpu lacks wherever it runs, whoever serves its tensors."""
    internal_functions()
    device_module()
    one_device()
    sync_batch_norm()


def for_our_backend() -> None:
    """What has to be so where podring serves "tpu" tensors."""
    compiled_collectives()


def for_their_backend() -> None:
    """What has to be so where torch_tpu's own process group serves "tpu" tensors on a virtual slice."""
    program_collectives()


_world: list[Any] = []


def program_collectives() -> None:
    """torch_tpu's process group (0.2.0) puts collectives into XLA programs, which on a virtual slice podring's fabric
    plays: so a group of podring's forms beside the default group, over the same store.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import _DistributedBackendOptions
    from torch_tpu._internal.distributed import tpu_distributed

    theirs = tpu_distributed.create_process_group

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        from podring import _register

        # The first group is the default group, of all ranks.
        if not dist.is_initialized():
            options: Any = _DistributedBackendOptions()
            options.store = dist.PrefixStore("podring", store)
            options.group_rank = rank
            options.group_size = size
            options.timeout = timeout
            options.group_id = "podring-programs"
            _world[:] = [_register.face().create(options)]
            _register.face().lend_world(_world[0])
        return theirs(one_message_one_descriptor(store), rank, size, timeout)

    for name in ("tpu_dist", "tpu"):
        dist.Backend.register_backend(name, create, devices=["tpu"])


def one_message_one_descriptor(store: Any) -> Any:
    """Messages between two ranks of torch_tpu's process group (0.2.0) find each other by one key of the store, in which
    a sender that is ahead reads the receive before. With this store each reads its own.
    """
    from podring import _register

    return _register.face().ordered_store(store)


def launch_environment(slice_name: str) -> None:
    """torch_tpu 0.2.0 aborts the process when PJRT starts under a launcher (WORLD_SIZE) without two variables of its
    own. libtpu's ranks dial the addresses; on a virtual slice nobody does.
    """
    from podring import _core

    _, _, devices, dims, slices = _core.slice_facts(slice_name)
    # It wants as many places as addresses. Several slices lie one behind the other here; which device is of which slice
    # each device says itself.
    dims = [slices * dims[0], *dims[1:]]
    cores = devices // (dims[0] * dims[1] * dims[2])
    shape = [*dims, cores] if cores > 1 else dims
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", ",".join(map(str, shape)))
    # Also for chips that no rank has: the rest of the job reads places and addresses as well, and takes two numbers of
    # processes for the contradiction that they would be. Each needs to be an address of its own.
    places = max(math.prod(shape), int(os.environ.get("WORLD_SIZE", "1")))
    os.environ.setdefault(
        "TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(f"localhost:{8471 + place}" for place in range(places))
    )


def launch_environment_on_tpu() -> None:
    """The same two on a TPU, where the addresses are dialled. `podring run` sets them; for the ranks of other launchers
    they follow from the launcher's and Cloud TPU's variables, and where those don't name the slice, torch_tpu (0.2.0)
    finds this host's shape on the PCI bus.
    """
    from torch_tpu._internal.utils import hardware

    from podring import _core

    world = os.environ.get("WORLD_SIZE")
    one_host = world is not None and os.environ.get("LOCAL_WORLD_SIZE", world) == world
    if one_host and not os.environ.get("PODRING_SLICE") and "TORCH_TPU_TOPOLOGY" not in os.environ:
        shape = hardware.get_tpu_topology(int(world or 1))
        if shape is not None:
            os.environ["TORCH_TPU_TOPOLOGY"] = shape
    os.environ.update(_core.tpu_environment())


def disk_cache() -> None:
    """torch_tpu 0.2.0 saves every program to its cache on disk, which a virtual slice refuses (docs/virtual-slice.md),
    and reports each as an error on stderr. Its name for no such cache is "disabled".
    """
    os.environ.setdefault("TORCH_TPU_TIER2_COMPILATION_CACHE", "disabled")


def hardware(slice_name: str) -> None:
    """torch_tpu 0.2.0 looks for chips on the PCI bus: with none there, torch.tpu says it is not available and has no
    name and no memory, and torch.manual_seed leaves the device unseeded.
    """
    from torch_tpu._internal.utils import hardware as found

    from podring import _core

    kind, memory, *_ = _core.slice_facts(slice_name)
    # One device per process.
    found.get_tpu_device_count = lambda: 1
    found.get_tpu_device_name = lambda: kind
    found.get_hbm_bytes_per_device = lambda: memory


def internal_functions() -> None:
    """torch_tpu 0.2.0 refuses torch.tpu.synchronize, device_count and others to callers outside torch by the caller's
    module name; trainers written for any accelerator call them. Its own switch turns the refusal into a warning.
    """
    from torch_tpu._internal.utils import annotations

    annotations._internal_apis_allowed_for_testing = True


def device_module() -> None:
    """torch.tpu of torch_tpu 0.2.0 lacks the memory functions that trainers call on any accelerator's module;
    torch.accelerator has them.
    """
    import torch

    module: Any = torch.tpu  # type: ignore[attr-defined]

    def forwarded(function: Callable[..., Any]) -> Callable[..., Any]:
        # A process has one device, which is the current one.
        return lambda device=None: function()

    for name in (
        "memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "empty_cache",
    ):
        function = getattr(torch.accelerator, name, None)
        if function is not None and not hasattr(module, name):
            setattr(module, name, forwarded(function))


def one_device() -> None:
    """torch.tpu.set_device(LOCAL_RANK), which init_device_mesh and trainers call on any accelerator, is refused by
    torch_tpu 0.2.0 on every rank of a host but the first: a process has one device, and its index is 0.
    """
    import torch

    module: Any = torch.tpu  # type: ignore[attr-defined]
    original = module.set_device

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index != int(os.environ.get("LOCAL_RANK", "0")):
            original(device)

    module.set_device = set_device


_library: list[Any] = []


def attention() -> None:
    """Attention in torch_tpu 0.2.0 is a TPU kernel (a Mosaic custom call), which XLA's CPU plugin doesn't know. On a
    virtual slice it is computed from its definition.
    """
    import torch

    def definition(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    library = torch.library.Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", definition, key, allow_override=True)
    _library.append(library)


def sync_batch_norm() -> None:
    """torch_tpu 0.2.0 has none of the five operators that torch.nn.SyncBatchNorm is made of ("operator
    'aten::batch_norm_stats' is not implemented for TPU"). Here they are, from their definitions: statistics over all
    dimensions but the second, in float32 for narrower types.
    """
    import torch
    from torch import Tensor

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    def others(tensor: Tensor) -> list[int]:
        return [dim for dim in range(tensor.dim()) if dim != 1]

    def spread(values: Tensor, like: Tensor) -> Tensor:
        return values.reshape([1, -1] + [1] * (like.dim() - 2))

    def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = wide(input)
        return x.mean(others(x)), (x.var(others(x), correction=0) + eps).rsqrt()

    def gather_stats(
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # [members, channels] and [members]: variances about each member's mean, brought to the common mean.
        weights = counts.reshape(-1, 1).to(mean.dtype)
        total = weights.sum()
        common = (mean * weights).sum(0) / total
        squares = ((invstd.pow(-2) - eps) * weights + (mean - common).pow(2) * weights).sum(0)
        if running_mean is not None:
            running_mean.lerp_(common.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
        return common, (squares / total + eps).rsqrt()

    def normalize(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
    ) -> Tensor:
        x = (wide(input) - spread(mean, input)) * spread(invstd, input)
        x = x if weight is None else x * spread(wide(weight), input)
        return (x if bias is None else x + spread(wide(bias), input)).to(input.dtype)

    def backward_sums(
        grad: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        input_g: bool,
        weight_g: bool,
        bias_g: bool,
    ) -> tuple[Tensor | None, ...]:
        dy = wide(grad)
        summed = dy.sum(others(dy))
        moved = (dy * (wide(input) - spread(mean, input))).sum(others(dy))
        kept = grad.dtype if weight is None else weight.dtype
        of_weight = (moved * invstd).to(kept) if weight_g else None
        return summed, moved, of_weight, summed.to(kept) if bias_g else None

    def backward_input(
        grad: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        summed: Tensor,
        moved: Tensor,
        counts: Tensor,
    ) -> Tensor:
        total = counts.sum()
        slope = spread(invstd.pow(2) * moved / total, input)
        dx = wide(grad) - spread(summed / total, input) - (wide(input) - spread(mean, input)) * slope
        scale = invstd if weight is None else invstd * wide(weight)
        return (dx * spread(scale, input)).to(input.dtype)

    library = torch.library.Library("aten", "IMPL")
    for name, function in (
        ("batch_norm_stats", stats),
        ("batch_norm_gather_stats_with_counts", gather_stats),
        ("batch_norm_elemt", normalize),
        ("batch_norm_backward_reduce", backward_sums),
        ("batch_norm_backward_elemt", backward_input),
    ):
        library.impl(name, function, "PrivateUse1", allow_override=True)
    _library.append(library)


def exit_barrier() -> None:
    """torch_tpu 0.2.0 calls torch.distributed.barrier() when the interpreter ends with a process group left open: a
    program that leaves one rank early would wait, or print an error, for no reason. Virtual chips need no such meeting,
    and no shutdown either: what is freed after it would ask for the client again.
    """
    from torch_tpu._internal.device import _device_module

    atexit.unregister(_device_module.get_device_module("tpu")._shutdown_runtime)


def compiled_collectives() -> None:
    """torch_tpu 0.2.0 lowers a collective inside torch.compile by running its group's backend on placeholders, which
    hold no data for another group to move ("cannot Materialize() a placeholder tensor"): podring._graphs.
    """
    from podring import _graphs

    _graphs.install()
