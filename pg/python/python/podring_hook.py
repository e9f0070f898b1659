"""What ``import torch`` calls (the entry-point group ``torch.backends``), apart from the package ``podring``: none of
that is imported before somebody needs it. Nothing here raises: an error would be one of ``import torch``.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any


def load() -> None:
    """Goes on to ``podring._hook`` where there is something to do. Never raises."""
    if (os.environ.get("PODRING_SLICE") or "").strip() or find_spec("torch_tpu") is not None:
        try:
            from podring import _hook
        except ImportError:
            # A core that can't be loaded: init_process_group("tpu") imports it too, and raises what is wrong with it.
            return
        _hook.load()


def autoload() -> None:
    """Makes ``init_method="tpu://host:port"`` and the backend ``"tpu"`` known.

    torch looks for a scheme before it loads a backend. And when it looks for a backend, it reads the metadata of every
    installed package, for tens of milliseconds.
    """
    try:
        register()
    except Exception:
        # Then torch finds it by the entry point.
        logging.getLogger(__name__).warning('podring can\'t register the backend "tpu"', exc_info=True)
    try:
        if os.environ.get("PODRING_AGENT_STORE"):
            # A worker of torchrun's --rdzv-backend=podring: env:// is its too.
            from podring import rendezvous

            rendezvous.register()
            return
        # The package's attribute of that name is a function.
        torchs = importlib.import_module("torch.distributed.rendezvous")
        if "tpu" not in torchs._rendezvous_handlers:
            torchs.register_rendezvous_handler("tpu", _tpu)
    except Exception:
        logging.getLogger(__name__).warning("podring can't register tpu://", exc_info=True)


def register() -> None:
    """Registers podring for CPU tensors, loading nothing of it.

    Not where there is torch_tpu: whose "tpu" is, and for which devices, depends on what is loaded there, and when.
    """
    if find_spec("torch_tpu") is not None:
        return
    import torch
    import torch.distributed as dist

    if not dist.is_available() or "TPU" in dist.Backend._plugins:
        return
    named = torch._C._get_privateuse1_backend_name() == "tpu"
    dist.Backend.register_backend("tpu", _create, extended_api=True, devices=["cpu", "tpu"] if named else ["cpu"])


def _create(opts: Any, backend_options: object | None) -> Any:
    from podring import _register

    return _register._create("tpu", opts, backend_options)


def _tpu(url: str, **kwargs: Any) -> Iterator[Any]:
    from podring import rendezvous

    yield from rendezvous._tpu(url, **kwargs)
