"""``torchrun --rdzv-backend=podring --rdzv-endpoint=host:port`` (an entry point of the group ``torchrun.handlers``).

Who takes part in a round is decided by torch's ``DynamicRendezvousHandler``; its state, and the workers' store, are in
podring's coordinator. The first agent whose host the endpoint names starts it, unless one is there already
(``podring coordinator``).
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from podring.rendezvous import AGENT_PREFIX, AGENT_STORE
from podring.store import Store

NAME = "podring"
_DEFAULT_PORT = 29400
_PREFIX = "podring/torchrun"
# Between an agent's place and its address.
_PLACE = "@"
# What compare_set answers for a key that isn't there, as no state is.
_NOTHING = "-"


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun asks the entry point for."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """The handler of one agent.

    Of ``--rdzv-conf``: ``is_host`` (whether this agent starts the coordinator; by itself it compares the endpoint with
    this host's names and addresses), ``node_rank`` (this agent's place among all, counted from 0; without it torch
    sorts the agents by address), ``read_timeout`` (seconds for the store's calls, 60), and what torch's own handler
    takes (``join_timeout``, ``last_call_timeout``, ``keep_alive_interval``, …).
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=_DEFAULT_PORT)
    if port == 0:
        raise ValueError(f"the endpoint {params.endpoint!r} needs a port: the other agents could not find port 0's")
    is_host = params.get_as_bool("is_host")
    if is_host is None:
        is_host = _matches_machine_hostname(host)
    seconds = params.get_as_int("read_timeout", 60) or 0
    if seconds <= 0:
        raise ValueError(f"read_timeout: expected a positive number of seconds, got {seconds}")
    place = params.get_as_int("node_rank")
    if place is not None and not 0 <= place < params.max_nodes:
        raise ValueError(f"node_rank: expected 0 to {params.max_nodes - 1}, the last of --nnodes, got {place}")
    try:
        store = Store(host, port, is_master=is_host, share=True, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RendezvousConnectionError(f"no podring coordinator at {host}:{port}: {error}") from error
    if place is not None:
        # torch's handler counts the agents in the order of their addresses, which are texts to it.
        address = params.local_addr or socket.getfqdn()
        params = copy.copy(params)
        params.local_addr = f"{place:010d}{_PLACE}{address}"
    inner = create_handler(store, Backend(store, params.run_id), params)
    return Handler(inner, store, host, port, place)


class Backend(RendezvousBackend):
    """The handler's state, in the coordinator's store.

    A stored state begins with a number of its writer's own, so that a writer knows whether it won: two states may be
    equal, two writes are not. The whole is the fencing token.
    """

    def __init__(self, store: dist.Store, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty")
        self._store = store
        self._key = f"{_PREFIX}/{run_id}/state"

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        return self._decoded(self._exchange(_NOTHING, _NOTHING))

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        desired = f"{uuid.uuid4().hex}:{base64.b64encode(state).decode()}"
        expected = "" if token is None else token if isinstance(token, str) else _NOTHING
        stored = self._exchange(expected, desired)
        found = self._decoded(stored)
        return None if found is None else (*found, stored == desired)

    def _exchange(self, expected: str, desired: str) -> str:
        try:
            return self._store.compare_set(self._key, expected, desired).decode()
        except RuntimeError as error:
            raise RendezvousConnectionError(f"podring's coordinator: {error}") from error

    def _decoded(self, stored: str) -> tuple[bytes, Any] | None:
        if stored in (_NOTHING, ""):
            return None
        try:
            return base64.b64decode(stored.partition(":")[2], validate=True), stored
        except binascii.Error as error:
            raise RendezvousStateError(f"the state under {self._key} is corrupt: {error}") from error


class Handler(RendezvousHandler):
    """torch's handler; tells the workers of a round where podring's store is, and which part of it is theirs."""

    def __init__(
        self, inner: DynamicRendezvousHandler, store: dist.Store, host: str, port: int, place: int | None = None
    ) -> None:
        self._inner, self._store, self._host, self._port, self._place = inner, store, host, port, place
        # torch's would start a TCPStore for the workers and tell the others of it, in the first round only: an agent
        # that comes later waits for it in vain. Ours is there already, and known to all.
        inner._shared_tcp_store_server = store
        inner._bootstrap_store_info = RendezvousStoreInfo(host, port)

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        if self._place is not None and info.rank != self._place:
            raise RendezvousStateError(
                f"node_rank {self._place} is number {info.rank} of the {info.world_size} agents that have come: "
                "another has the same node_rank, or one has none"
            )
        if not self._inner.use_agent_store:
            os.environ.pop(AGENT_STORE, None)
            # torch's own store is at the first agent's address.
            there = info.bootstrap_store_info
            if there is not None and _PLACE in there.master_addr:
                address = there.master_addr.partition(_PLACE)[2]
                there = RendezvousStoreInfo(address, there.master_port)
                return RendezvousInfo(info.store, info.rank, info.world_size, there)
            return info
        # Each round's workers find an empty store. info.store is the round's own already.
        base = f"{_PREFIX}/{self.get_run_id()}"
        if info.rank == 0:
            generation = self._store.add(f"{base}/generation", 1)
            info.store.set("podring/generation", str(generation))
            self._forget(f"{base}/workers/{generation - 1}/")
        generation = int(info.store.get("podring/generation"))
        # The workers inherit this process's environment.
        os.environ[AGENT_STORE] = f"{self._host}:{self._port}"
        os.environ[AGENT_PREFIX] = f"{base}/workers/{generation}"
        there = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(info.store, info.rank, info.world_size, there)

    def _forget(self, prefix: str) -> None:
        for key in self._store.list_keys():
            if key.startswith(prefix):
                self._store.delete_key(key)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()
