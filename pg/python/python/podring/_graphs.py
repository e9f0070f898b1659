"""Collectives inside torch.compile's graphs on TPU tensors (torch_tpu 0.2.0).

A graph with collectives is compiled whole: torch_tpu lowers each of them into the XLA program, with the ranks of
podring's group, through a process group of its own of the same ranks ("twin"), made when the first graph asks for it.
On a TPU that is an ICI collective in the program; on a virtual slice podring's interposer has the fabric play it.

A graph that can't be compiled so is split: each collective then runs between compiled parts, through podring's group.

Which happened is counted in ``torch._dynamo.utils.counters["podring"]``, and logged with PODRING_LOG=info.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from podring import _core

log = logging.getLogger("podring")

INSIDE = "collectives in compiled graphs"
SPLIT = "collectives between compiled graphs"
_TWIN = "podring-graph-"
# By podring's group, for as long as that one is there.
_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def install() -> None:
    """Has torch_tpu's compiler do this."""
    from torch_tpu._internal.compile import split_compiler

    _log_as_asked()
    compiler = split_compiler.SplitCompiler
    original = compiler._compile_graph

    def compile_graph(
        self: Any,
        graph_module: Any,
        example_inputs: Any,
        is_fwd: bool = True,
        materialize_collectives: bool = True,
        **kwargs: Any,
    ) -> Any:
        collectives = [node for node in graph_module.graph.nodes if _is_collective(node)]
        if not collectives:
            return original(self, graph_module, example_inputs, is_fwd, materialize_collectives, **kwargs)
        count = len(collectives)
        try:
            twin = _with_twins(graph_module)
            # torch_tpu's word for a graph that is not split at its collectives.
            made = original(self, twin, example_inputs, is_fwd, False, **kwargs)
            made.resolve()
        except Exception as error:
            log.info("a graph is split at its %d collectives, which can't stay inside: %s", count, error)
            _count(SPLIT, count)
            return original(self, graph_module, example_inputs, is_fwd, True, **kwargs)
        log.info("%d collectives stay inside of a compiled graph", count)
        _count(INSIDE, count)
        return made

    compiler._compile_graph = compile_graph

    parts = split_compiler._SubmodCompiler
    compile_part = parts.compile_submod

    def compile_submod(self: Any, mod: Any, args: Any, kwargs: Any, submod_name: Any = None) -> Any:
        if not any(_is_collective(node) and not _is_twin(node) for node in mod.graph.nodes):
            return compile_part(self, mod, args, kwargs, submod_name)
        # torch_tpu has put the collective into a module of its own; it runs as it is.
        compile_one = self.compiler_fn
        self.compiler_fn = lambda module, inputs, module_name=None: _eager(module)
        try:
            return compile_part(self, mod, args, kwargs, submod_name)
        finally:
            self.compiler_fn = compile_one

    parts.compile_submod = compile_submod


class _ToCore(logging.Handler):
    """Has the core write a message, in a line like its own."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _core.log(min(record.levelno, logging.CRITICAL), self.format(record))
        except Exception:
            self.handleError(record)


def _log_as_asked() -> None:
    """PODRING_LOG says what is shown; without it Python's own settings of logging do."""
    if os.environ.get("PODRING_LOG", "").strip() and not log.handlers:
        log.addHandler(_ToCore())
        log.propagate = False
        log.setLevel(_core.log_level())


def _count(what: str, count: int) -> None:
    from torch._dynamo.utils import counters

    counters["podring"][what] += count


def _is_collective(node: Any) -> bool:
    from torch_tpu._internal.distributed import collective_ops

    return node.op == "call_function" and collective_ops.is_collective_op(node.target)


def _group_argument(node: Any) -> tuple[int | str, Any]:
    """Where a collective's group stands among its arguments (a place or a name), and what stands there."""
    for name in ("group_name", "group"):
        if name in node.kwargs:
            return name, node.kwargs[name]
    packet = node.target
    schema = getattr(packet, "_schema", None) or packet.default._schema
    for place, argument in enumerate(schema.arguments):
        if argument.name in ("group_name", "group") and place < len(node.args):
            return place, node.args[place]
    raise ValueError(f"{node.target} names no group")


def _is_twin(node: Any) -> bool:
    _, group = _group_argument(node)
    name = group.group_name if isinstance(group, dist.ProcessGroup) else group
    return isinstance(name, str) and name.startswith(_TWIN)


def _with_twins(graph_module: Any) -> Any:
    """A copy of a graph whose collectives are those of twins; what it has of tensors is shared."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        made = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        made.meta = copy.copy(graph_module.meta)
        for node in made.graph.nodes:
            if not _is_collective(node):
                continue
            place, group = _group_argument(node)
            if not isinstance(group, (str, dist.ProcessGroup)):
                raise ValueError(f"the group of {node.target} is {group!r}, expected a group or its name")
            twin = _twin(group if isinstance(group, str) else group.group_name)
            value = twin.group_name if isinstance(group, str) else twin
            if isinstance(place, str):
                node.kwargs = {**node.kwargs, place: value}
            else:
                node.args = (*node.args[:place], value, *node.args[place + 1 :])
    made.recompile()
    return made


def _twin(name: str) -> Any:
    """torch_tpu's process group of the ranks of podring's group `name`."""
    from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
    from torch_tpu._internal.distributed import tpu_distributed

    group = _resolve_process_group(dist.distributed_c10d.GroupName(name))
    # Compiled graphs may hold groups that were destroyed.
    alive = dist.distributed_c10d._world.pg_map
    for other in [other for other in list(_twins) if other not in alive]:
        _end_twin(other)
    if (known := _twins.get(group)) is not None:
        return known
    tpu = torch.device("tpu")
    ranks = dist.get_process_group_ranks(group)
    store = dist.PrefixStore(f"{_TWIN}{name}-{ranks}", dist.distributed_c10d._get_default_store())
    backend = tpu_distributed.create_process_group(
        store, group.rank(), group.size(), group._get_backend(tpu).options._timeout
    )
    kind = dist.ProcessGroup.BackendType.CUSTOM
    twin = dist.ProcessGroup(store, group.rank(), group.size())
    twin._set_default_backend(kind)
    twin._register_backend(tpu, kind, backend)
    twin_name = dist.distributed_c10d.GroupName(_TWIN + name)
    twin._set_group_name(twin_name)
    twin._set_group_desc(f"torch_tpu's lowering for {name}")
    _register_process_group(twin_name, twin)
    _twins[group] = twin
    # Not at the interpreter's end, when c10d's registry may be gone.
    weakref.finalize(group, _unregister, weakref.ref(twin), twin_name).atexit = False
    return twin


def _end_twin(group: Any) -> None:
    """Lets go of the twin of a group that was destroyed."""
    if (twin := _twins.pop(group, None)) is not None:
        _unregister(weakref.ref(twin), twin.group_name)


def _unregister(twin: weakref.ref[Any], name: Any) -> None:
    """c10d forgets a twin, unless another one has its name by now."""
    from torch._C._distributed_c10d import _resolve_process_group, _unregister_process_group

    with contextlib.suppress(RuntimeError):  # It is gone; its name is left.
        if _resolve_process_group(name) is not twin():
            return
    _unregister_process_group(name)


@functools.cache
def _eager_type() -> type[Any]:
    from torch_tpu._internal.compile import torch_tpu_compiled_executable

    class Eager(torch_tpu_compiled_executable.CompiledArtifact):  # type: ignore[misc]
        """A module with a collective in it, called as it is."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self._module = module

        def __call__(self, *args: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], (list, tuple)):
                args = tuple(args[0])
            return self._module(*args)

        def __reduce__(self) -> tuple[Any, ...]:
            return (_eager, (self._module,))

        def fingerprint(self) -> str:
            return ""

    return Eager


def _eager(module: Any) -> Any:
    return _eager_type()(module)
