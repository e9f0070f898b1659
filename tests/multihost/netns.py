"""Hosts as network namespaces of this machine, joined by bridges in a namespace of their own.

Nothing is left behind: the namespaces go when the test has ended, however it ended; if the whole test run was killed,
the next one that makes hosts removes them. The machine's own network isn't touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import BACKEND, End, attempt, run

CLONE_NEWNET = 0x40000000
PREFIX = "podring-test-"
RANKS = 2
"""Of each host."""
LIVE = "eth0"
"""The interface that works, on every host."""


@dataclass(frozen=True)
class Network:
    """One on which every host has an interface; host n has `address` with n + 1 in it. A dead one loses everything."""

    interface: str
    address: str
    dead: bool = False

    def of(self, host: int) -> str:
        """A host's address there, without the length of its prefix."""
        return self.address.format(host + 1).partition("/")[0]


IPV4 = Network(LIVE, "10.77.0.{}/24")
IPV6 = Network(LIVE, "fd77::{}/64")
DEAD = Network("dead0", "10.66.0.{}/24", dead=True)
"""Its addresses are lower than those of IPV4, so that they are published before."""

SETUPS: dict[str, tuple[Network, ...]] = {"IPv4": (IPV4,), "IPv6": (IPV6,), "two NICs, one dead": (DEAD, IPV4)}


class Hosts:
    """Some hosts. Made by hosts()."""

    def __init__(self, count: int, networks: tuple[Network, ...]) -> None:
        self.count = count
        self.ranks = count * RANKS
        self.networks = networks
        self._prefix = f"{PREFIX}{os.getpid()}-{secrets.token_hex(2)}-"
        self._port = 29400

    @property
    def _switch(self) -> str:
        return self._prefix + "switch"

    def name(self, host: int) -> str:
        """A host's namespace."""
        return f"{self._prefix}{host}"

    def address(self, host: int) -> str:
        """Where a host can be reached."""
        return next(network for network in self.networks if not network.dead).of(host)

    def _make(self) -> None:
        for name in [self._switch, *map(self.name, range(self.count))]:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if IPV6 not in self.networks:
                ip("netns", "exec", name, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
        for number, network in enumerate(self.networks):
            bridge = f"br{number}"
            ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")
            for host in range(self.count):
                plug, name, interface = f"port{number}.{host}", self.name(host), network.interface
                peer = ("peer", "name", interface, "netns", name)
                ip("-n", self._switch, "link", "add", plug, "type", "veth", *peer)
                if not network.dead:
                    ip("-n", self._switch, "link", "set", plug, "master", bridge)
                ip("-n", self._switch, "link", "set", plug, "up")
                flags = ("nodad",) if ":" in network.address else ()
                ip("-n", name, "addr", "add", network.address.format(host + 1), "dev", interface, *flags)
                ip("-n", name, "link", "set", interface, "up")
                if network.dead:
                    # The link layer seems to know the others, so that no error comes from it: just silence.
                    for other in range(self.count):
                        if other != host:
                            where = ("lladdr", "02:00:00:00:00:01", "dev", interface)
                            ip("-n", name, "neigh", "add", network.of(other), *where)

    def _remove(self) -> None:
        for name in namespaces():
            if name.startswith(self._prefix):
                remove(name)

    def enter(self, host: int) -> None:
        """Moves this process there. Before it has opened a socket or started a thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/run/netns/{self.name(host)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)

    def _rank(
        self, body: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str], host_env: HostEnv, op: float
    ) -> Callable[[], Any]:
        self._port += 1
        port = self._port

        def main() -> Any:
            rank = int(os.environ["RANK"])
            host = rank // RANKS
            self.enter(host)
            os.environ.update(
                MASTER_ADDR=self.address(0),
                MASTER_PORT=str(port),
                LOCAL_RANK=str(rank % RANKS),
                LOCAL_WORLD_SIZE=str(RANKS),
                PODRING_HOST_ID=f"host{host}",
            )
            for name, value in {**env, **host_env(host)}.items():
                if value:
                    os.environ[name] = value
                else:
                    os.environ.pop(name, None)
            dist.init_process_group(BACKEND, init_method="env://", timeout=timedelta(seconds=op))
            value = body(*args)
            if dist.is_initialized():
                dist.destroy_process_group()
            return value

        return main

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        host_env: HostEnv = lambda host: {},
        op_timeout: float = 30.0,
        timeout: float = 90.0,
    ) -> list[Any]:
        """What body(*args) returned on each rank; two ranks a host, env:// with host 0's address. As harness.run().

        `env` holds for all, host_env(host) for one; an empty value takes the variable away.
        """
        main = self._rank(body, args, env or {}, host_env, op_timeout)
        return run(main, self.ranks, timeout=timeout, init=False)

    def attempt(
        self,
        body: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        host_env: HostEnv = lambda host: {},
        op_timeout: float = 30.0,
        timeout: float = 60.0,
    ) -> list[End]:
        """As run(), but gives how each rank ended. As harness.attempt()."""
        main = self._rank(body, args, env or {}, host_env, op_timeout)
        return attempt(main, self.ranks, timeout=timeout, init=False)


HostEnv = Callable[[int], Mapping[str, str]]


def ip(*words: str) -> str:
    """Runs ip(8)."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """Those that have names."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]


def remove(name: str) -> None:
    """Removes a namespace, and with it its interfaces."""
    with contextlib.suppress(OSError):
        ip("netns", "delete", name)


def sweep() -> None:
    """Removes what test runs that were killed have left."""
    for name in namespaces():
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            remove(name)


@contextlib.contextmanager
def hosts(count: int, networks: tuple[Network, ...]) -> Iterator[Hosts]:
    """Makes hosts and removes them. Where the system doesn't allow that, the test fails and says why."""
    made = Hosts(count, networks)
    try:
        try:
            sweep()
            made._make()
        except OSError as error:
            pytest.fail(f"these tests need network namespaces: root, or CAP_SYS_ADMIN and CAP_NET_ADMIN. {error}")
        yield made
    finally:
        made._remove()


def sent(interface: str) -> int:
    """Bytes that this process's host has sent through an interface."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise LookupError(interface)
