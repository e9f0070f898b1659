"""``init_method="tpu://host:port"``: rank, world size and a store, all from podring's coordinator.

``torch.distributed`` looks the scheme up before it loads the backend, so the entry point of the backend comes too late.
``podring_hook``, which ``import torch`` calls, registers it instead. Where such hooks are switched off
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``podring.rendezvous.register()`` does.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from podring.store import DEFAULT_TIMEOUT, Credentials, Store

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore

SCHEME = "tpu"
COORDINATOR = "PODRING_COORDINATOR"
"""``host:port`` of a coordinator that no rank starts."""
AGENT_STORE = "PODRING_AGENT_STORE"
"""``host:port`` of the coordinator, and
"""
AGENT_PREFIX = "PODRING_AGENT_PREFIX"
"""where a worker's keys are in it: torchrun's agent (``podring._torchrun``) sets both."""

_QUERY = {
    "token_file": "token_file",
    "tls_ca": "tls_ca",
    "tls_cert": "tls_cert",
    "tls_key": "tls_key",
    "tls_name": "server_name",
}

Rendezvous = Iterator[tuple["C10dStore", int, int]]


def register() -> None:
    """Makes ``tpu://`` known, and gives the workers of ``torchrun --rdzv-backend=podring`` its store for ``env://``."""
    # The package's attribute of that name is a function.
    torchs = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Callable[..., Rendezvous]] = torchs._rendezvous_handlers
    if SCHEME not in handlers:
        torchs.register_rendezvous_handler(SCHEME, _tpu)
    original = handlers.get("env")
    if AGENT_STORE in os.environ and original is not None and not getattr(original, "podring", False):
        handlers["env"] = _agents_or(original)


def _tpu(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Rendezvous:
    parsed = urlparse(url)
    query = dict(pair.partition("=")[::2] for pair in parsed.query.split("&") if pair)
    # A coordinator of its own, which no rank starts.
    standing = not parsed.netloc
    named = urlparse(f"//{os.environ.get(COORDINATOR, '').strip()}") if standing else parsed
    host, port = named.hostname, named.port
    launched = None if host and "rank" in query and "world_size" in query else _launched(query)
    if not host and launched is not None:
        host = launched.first_host
    if not host or not port:
        raise _error(
            f"expected tpu://host:port with a port from 1 to 65535 (or tpu:// and {COORDINATOR}, or tpu://:port where "
            f"the launcher names rank 0's host), got {url!r}"
        )
    unknown = set(query) - {*_QUERY, "rank", "world_size", "insecure"}
    if unknown:
        raise _error(f"unknown in {url!r}: {', '.join(sorted(unknown))}")
    rank, world_size = (_chosen(query, name, launched) for name in ("rank", "world_size"))
    # -1 is how torch's RPC says that the world has no fixed size.
    if rank < 0 or (world_size < 1 and world_size != -1) or 0 < world_size <= rank:
        raise _error(f"expected a rank from 0 to world_size - 1, got rank {rank} of {world_size}")
    given: dict[str, Any] = {field: query[name] for name, field in _QUERY.items() if name in query}
    if "insecure" in query:
        given["insecure"] = query["insecure"] == "1"
    credentials = dataclasses.replace(Credentials.from_environment(), **given)
    serves = rank == 0 and not standing
    store = Store(host, port, is_master=serves, share=True, credentials=credentials, timeout=timeout)
    yield store, rank, world_size
    raise RuntimeError("tpu:// has no second rendezvous: destroy the process group and initialise it again")


@dataclasses.dataclass(frozen=True)
class _Launched:
    """What the launcher's variables add to what was given."""

    rank: int | None
    world_size: int | None
    first_host: str | None
    sought: str


def _launched(query: dict[str, str]) -> _Launched:
    from podring import _core

    given = {name: int(query[name]) for name in ("rank", "world_size") if query.get(name, "").isdecimal()}
    try:
        return _Launched(*_core.launch_place(**given))
    except ValueError as error:
        raise _error(str(error)) from None
    except OverflowError:
        # What was given is out of all bounds, and will be refused as such.
        return _Launched(None, None, None, "")


def _chosen(query: dict[str, str], name: str, launched: _Launched | None) -> int:
    if launched is None or name in query:
        return _number(query, name)
    value: int | None = getattr(launched, name)
    if value is None:
        raise _error(f"no {name}: give it as an argument, in the URL, or as {name.upper()}; {launched.sought}")
    return value


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, os.environ.get(name.upper()))
    if text is None:
        raise _error(f"no {name}: give it as an argument, in the URL, or as {name.upper()}")
    try:
        return int(text)
    except ValueError:
        raise _error(f"{name}: expected a number, got {text!r}") from None


def _error(what: str) -> ValueError:
    return ValueError(f"tpu:// rendezvous: {what}")


def _agents_or(original: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    """``env://`` of a worker whose agent's store is podring's; any other goes torch's way."""

    def env(url: str, **kwargs: Any) -> Rendezvous:
        from torch.distributed import PrefixStore

        agent = os.environ.get(AGENT_STORE, "")
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        # A program that says where else its master is doesn't mean this store.
        if agent != master or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            yield from original(url, **kwargs)
            return
        query = dict(pair.partition("=")[::2] for pair in urlparse(url).query.split("&") if pair)
        rank, world_size = (_number(query, name) for name in ("rank", "world_size"))
        host, _, port = agent.rpartition(":")
        store = Store(host, int(port), timeout=kwargs.get("timeout", DEFAULT_TIMEOUT))
        yield PrefixStore(os.environ[AGENT_PREFIX], store), rank, world_size
        raise RuntimeError("torchrun's agent starts its workers anew for another rendezvous")

    env.podring = True  # type: ignore[attr-defined]
    return env
