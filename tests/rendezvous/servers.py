"""Stores for the tests: a server in a process of its own, and clients of it.

The server is a forked child, so that the test's own process starts no thread: other tests fork from it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import podring
import torch.distributed as dist
from podring.store import Credentials

from tests import processes

T = TypeVar("T")
AnyStore: TypeAlias = Any
"""A store: torch's annotations lack half of its methods."""
HOST = "127.0.0.1"
LIMIT = 120.0
"""Seconds after which a server that was forgotten ends by itself."""


@dataclass
class Server:
    """A store's server. `kind` is tcp or podring."""

    kind: str
    port: int
    process: processes.Rank
    token: str = ""

    def client(self, timeout: float = 10.0, token: str | None = None) -> AnyStore:
        """A client with a connection of its own."""
        limit = timedelta(seconds=timeout)
        if self.kind == "tcp":
            return dist.TCPStore(HOST, self.port, is_master=False, timeout=limit)
        token = self.token if token is None else token
        return podring.Store(HOST, self.port, timeout=limit, token=token, credentials=Credentials())

    def kill(self) -> None:
        """Ends it as a crash would."""
        processes.kill(self.process)

    def stop(self) -> None:
        """Stops it until go_on(). Each of its threads stops when it next leaves the kernel, which may be a while."""
        signal.pidfd_send_signal(self.process.pidfd, signal.SIGSTOP)
        end = time.monotonic() + 10
        while any(running(thread) for thread in Path(f"/proc/{self.process.pid}/task").iterdir()):
            assert time.monotonic() < end, "it doesn't stop"
            time.sleep(0.001)

    def go_on(self) -> None:
        """After stop()."""
        signal.pidfd_send_signal(self.process.pidfd, signal.SIGCONT)


def running(thread: Path) -> bool:
    """Whether a thread is neither stopped nor gone."""
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][0] not in "TZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def server(kind: str, token: str = "", port: int = 0, credentials: Credentials | None = None) -> Iterator[Server]:
    """A server that ends with the block."""

    def main(pipe: processes.Connection) -> None:
        store: AnyStore
        if kind == "tcp":
            store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
        else:
            store = podring.Store(HOST, port, is_master=True, token=token, credentials=credentials or Credentials())
        pipe.send(store.port)
        with contextlib.suppress(EOFError):
            pipe.recv()

    with tempfile.TemporaryDirectory(prefix="podring-store-") as directory:
        log = Path(directory) / "server.log"
        process = processes.fork(main, log, LIMIT)
        try:
            if not process.pipe.poll(60):
                raise TimeoutError(f"no server: {process.output()}")
            yield Server(kind, process.pipe.recv(), process, token)
        finally:
            processes.kill(process)


def run(body: Callable[[], object], timeout: float = 30.0) -> processes.Rank:
    """Starts body() in a forked process; see end()."""
    directory = tempfile.mkdtemp(prefix="podring-store-")
    return processes.fork(lambda pipe: pipe.send(body()), Path(directory) / "log", timeout)


def end(process: processes.Rank, timeout: float = 30.0) -> Any:
    """What the body of run() returned."""
    try:
        if not process.pipe.poll(timeout):
            raise TimeoutError(f"still running after {timeout} s: {process.output()}")
        return process.pipe.recv()
    except EOFError:
        raise AssertionError(process.output()) from None
    finally:
        processes.kill(process)
        with contextlib.suppress(OSError):
            os.unlink(process.log)
            os.rmdir(process.log.parent)


def _alone(body: Callable[[], T]) -> T:
    # Its thread isn't in what the body forks, which would wait for it.
    faulthandler.cancel_dump_traceback_later()
    return body()


class Jobs:
    """Jobs that mostly wait, for several tests: all begin when the first one's end is asked for, each in a process of
    its own. What a body raised is raised for who asks for it."""

    def __init__(self, bodies: Mapping[str, Callable[[], object]], timeout: float = 60.0) -> None:
        self._bodies, self._timeout = bodies, timeout
        self._running: dict[str, processes.Rank] = {}

    def ended(self, name: str) -> Any:
        """What the body of this name returned. Asked once."""
        if not self._running:
            for each, body in self._bodies.items():
                self._running[each] = run(functools.partial(_alone, body), self._timeout)
        return end(self._running[name], self._timeout)

    def kill(self) -> None:
        """Ends those that still run."""
        for process in self._running.values():
            processes.kill(process)


@contextlib.contextmanager
def jobs(bodies: Mapping[str, Callable[[], object]], timeout: float = 60.0) -> Iterator[Jobs]:
    """Jobs that end with the block."""
    made = Jobs(bodies, timeout)
    try:
        yield made
    finally:
        made.kill()


def side_by_side(bodies: Mapping[str, Callable[[], T]], timeout: float = 60.0) -> dict[str, T]:
    """What each body returned. All run at once, each in a process of its own: jobs that mostly wait."""
    with jobs(bodies, timeout) as made:
        return {name: made.ended(name) for name in bodies}
