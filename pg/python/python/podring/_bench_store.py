"""The store beside ``torch.distributed.TCPStore``: ``podring bench rendezvous --vs tcpstore`` runs this.

Prints one line of JSON. Each store's server is a process of its own, and so is each client. Both stores' clients run
the same loops, in turns within one run; a rate is the median of the turns, over all clients, in calls per second.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from podring.store import Credentials, Store

HOST = "127.0.0.1"
PEERS = ("tcpstore", "podring")
LIMIT = timedelta(seconds=60)
TOKEN = "0123456789abcdef-of-the-bench"
KEYS = 64
"""Keys of one multi-get or multi-set."""
VALUE = "7" * 32
WAITS = 50_000
"""At most so many in one measurement: each leaves a key, and a store takes 2^20."""

Loop = Callable[[dist.Store, int, float], float]


def _connect(peer: str, port: int, master: bool = False) -> Any:
    if peer == "tcpstore":
        return dist.TCPStore(HOST, port, is_master=master, wait_for_workers=False, timeout=LIMIT)
    return Store(HOST, port, is_master=master, timeout=LIMIT, credentials=Credentials(token=TOKEN))


def _serve(peer: str, pipe: Connection) -> None:
    store = _connect(peer, 0, master=True)
    pipe.send(store.port)
    # Until the other end is gone; the server lives as long as the store does.
    with contextlib.suppress(EOFError):
        pipe.recv()
    del store


def _timed(act: Callable[[], int], seconds: float) -> float:
    count, began = 0, time.perf_counter()
    until = began + seconds
    while time.perf_counter() < until:
        count += act()
    return count / (time.perf_counter() - began)


def _singles(store: dist.Store, client: int, seconds: float) -> float:
    """The calls of one key, in turns. Neither store waits for an answer to set."""
    key, count = f"bench/{client}", f"bench/count/{client}"

    def act() -> int:
        store.set(key, VALUE)
        store.get(key)
        store.check([key])
        store.add(count, 1)
        store.compare_set(key, VALUE, VALUE)
        return 5

    return _timed(act, seconds)


def _only(call: Callable[[dist.Store, str], object]) -> Loop:
    def loop(store: dist.Store, client: int, seconds: float) -> float:
        key = f"bench/only/{client}"
        store.set(key, "1")

        def act() -> int:
            call(store, key)
            return 1

        rate = _timed(act, seconds)
        store.check([key])  # the server is through with it
        return rate

    return loop


# Any: torch's annotations lack multi_set.
def _many(store: Any, client: int, seconds: float) -> float:
    keys = [f"bench/many/{client}/{key}" for key in range(KEYS)]
    values = [VALUE] * KEYS

    def act() -> int:
        store.multi_set(keys, values)
        store.multi_get(keys)
        return 2

    return _timed(act, seconds)


LOOPS: dict[str, Loop] = {
    "single": _singles,
    "multi": _many,
    "set": _only(lambda store, key: store.set(key, "1")),
    "get": _only(lambda store, key: store.get(key)),
    "add": _only(lambda store, key: store.add(key, 1)),
}


def _client(client: int, clients: int, waiting: bool, seconds: float, turns: int, ports: list[int], out: Any) -> None:
    stores = [_connect(peer, port) for peer, port in zip(PEERS, ports, strict=True)]
    rates: dict[str, list[list[float]]] = {}
    names = ["wait"] if waiting else list(LOOPS)
    for turn in range(turns):
        for name in names:
            for peer, store in enumerate(stores):
                store.barrier(f"bench/{waiting}/{clients}/{turn}/{name}", clients, LIMIT)
                if waiting:
                    rate = _waits(store, clients, client, seconds, f"{clients}/{turn}")
                else:
                    rate = LOOPS[name](store, client, seconds)
                rates.setdefault(name, [[], []])[peer].append(rate)
    out.put(rates)


def _waits(store: dist.Store, clients: int, client: int, seconds: float, turn: str) -> float:
    """Client 0 sets a key that all others wait for; each of them sets one, and client 0 waits for those.

    How many waits ended so in a second, as client 0 saw it, over as many rounds as it finds to take about `seconds`,
    bounded by WAITS.
    """
    rounds = 50
    rate = 0.0
    for part in range(2):
        began = time.perf_counter()
        for number in range(rounds):
            base = f"bench/wait/{turn}/{part}/{number}"
            if client == 0:
                store.set(f"{base}/go", "")
                store.wait([f"{base}/{other}" for other in range(1, clients)])
            else:
                store.wait([f"{base}/go"])
                store.set(f"{base}/{client}", "")
        elapsed = time.perf_counter() - began
        rate = rounds * clients / elapsed
        if part == 0 and client == 0:
            store.set(f"bench/wait/{turn}/rounds", str(min(WAITS // clients, max(50, int(rounds * seconds / elapsed)))))
        rounds = int(store.get(f"bench/wait/{turn}/rounds"))
    return rate if client == 0 else 0.0


def _measure(context: Any, clients: int, waiting: bool, seconds: float, turns: int, ports: list[int]) -> dict[str, Any]:
    out = context.Queue()
    # One who sets beside those who wait.
    total = clients + 1 if waiting else clients
    arguments = [(client, total, waiting, seconds, turns, ports, out) for client in range(total)]
    running = [context.Process(target=_client, args=each, daemon=True) for each in arguments]
    for process in running:
        process.start()
    answers = []
    for _ in running:
        answers.append(out.get(timeout=120 + 20 * seconds * turns))
    for process in running:
        process.join(30)
    sums = {
        name: [
            [sum(values) for values in zip(*(answer[name][peer] for answer in answers), strict=True)] for peer in (0, 1)
        ]
        for name in answers[0]
    }
    rates = {name: {peer: statistics.median(of[i]) for i, peer in enumerate(PEERS)} for name, of in sums.items()}
    return {name: {**rate, "ratio": rate["podring"] / rate["tcpstore"]} for name, rate in rates.items()}


def main(arguments: list[str]) -> int:
    """SECONDS TURNS: of each measurement."""
    seconds, turns = float(arguments[0]), int(arguments[1])
    context: Any = multiprocessing.get_context("fork")
    servers, ports = [], []
    for peer in PEERS:
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(peer, theirs), daemon=True)
        server.start()
        servers.append((server, ours))
        if not ours.poll(60):
            raise TimeoutError(f"no {peer} server")
        ports.append(ours.recv())
    found = []
    for clients in (1, 8):
        of_one = _measure(context, clients, False, seconds, turns, ports)
        of_one.update(_measure(context, clients, True, seconds, turns, ports))
        found.append({"clients": clients, **of_one})
    for server, _ in servers:
        server.kill()
        server.join(10)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
