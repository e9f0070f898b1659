"""The key-value store of podring's coordinator, as a ``torch.distributed`` store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podring_torch import RendezvousStore

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""torch's own for a store."""
_WORKERS = "podring/workers"

_NO, _SERVE, _SHARE = range(3)


@dataclass(frozen=True)
class Credentials:
    """What proves that this process belongs to the job. An empty string: not given."""

    token: str = ""
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    server_name: str = ""
    insecure: bool = False

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Credentials:
        """PODRING_TOKEN_FILE, PODRING_TLS_CA, PODRING_TLS_CERT, PODRING_TLS_KEY, PODRING_TLS_NAME, PODRING_INSECURE."""
        get = environment.get
        return Credentials(
            token_file=get("PODRING_TOKEN_FILE", ""),
            tls_ca=get("PODRING_TLS_CA", ""),
            tls_cert=get("PODRING_TLS_CERT", ""),
            tls_key=get("PODRING_TLS_KEY", ""),
            server_name=get("PODRING_TLS_NAME", ""),
            insecure=get("PODRING_INSECURE", "") == "1",
        )


def Store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
    wait_for_workers: bool = True,
    *,
    share: bool = False,
    credentials: Credentials | None = None,
    token: str = "",
    state_dir: str | os.PathLike[str] = "",
) -> RendezvousStore:
    """A client of the coordinator at ``host_name:port``; the arguments are those of ``torch.distributed.TCPStore``.

    With ``is_master`` the coordinator is started in this process (port 0: a free one, ``.port`` tells), and ends with
    the last reference to the store or a clone of it. If somebody listens there already, that is an error, or with
    ``share`` the one that is used. ``state_dir`` keeps its store across restarts.

    With a ``world_size`` and ``wait_for_workers`` the master waits for that many clients, itself included.

    ``token`` and ``credentials`` (otherwise those of the environment) must be the coordinator's. One that other hosts
    can reach wants a token or certificates, or ``insecure``.

    Raises ``ValueError`` for arguments that can't be, ``DistNetworkError`` if there is no coordinator in time, or
    something else, ``DistStoreError`` if it refuses or the workers don't come.
    """
    from podring._register import face

    if not 0 <= port < 2**16 or (port == 0 and not is_master):
        raise ValueError(f"expected a port from {0 if is_master else 1} to 65535, got {port}")
    known = credentials or Credentials.from_environment()
    store = face().store(
        host=host_name,
        port=port,
        timeout=timeout.total_seconds(),
        serve=(_SHARE if share else _SERVE) if is_master else _NO,
        insecure=known.insecure,
        token=token or known.token,
        token_file=known.token_file,
        tls_ca=known.tls_ca,
        tls_cert=known.tls_cert,
        tls_key=known.tls_key,
        server_name=known.server_name,
        state_dir=os.fspath(state_dir),
    )
    if world_size is not None and world_size > 0 and wait_for_workers:
        _meet(store, world_size, is_master, timeout)
    return store


def _meet(store: RendezvousStore, world_size: int, is_master: bool, timeout: timedelta) -> None:
    from torch.distributed import DistStoreError

    came = store.add(_WORKERS, 1)
    deadline = time.monotonic() + timeout.total_seconds()
    while is_master and came < world_size:
        if time.monotonic() > deadline:
            raise DistStoreError(f"{came} of {world_size} clients came within {timeout.total_seconds():g} s")
        time.sleep(0.01)
        came = store.add(_WORKERS, 0)
