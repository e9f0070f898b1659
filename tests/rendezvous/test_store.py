"""One battery for every store of torch.distributed's kind: podring's must do what TCPStore does."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import podring
import pytest
import torch.distributed as dist
from podring.store import Credentials

from tests import processes
from tests.harness import free_port
from tests.rendezvous import servers
from tests.rendezvous.coordinator import certificates
from tests.rendezvous.servers import HOST, AnyStore, Server, server

T = TypeVar("T")
KINDS = ["tcp", "podring", "tcp-prefix", "podring-prefix"]
SHORT = timedelta(milliseconds=200)
# What a loaded machine may add to a bound.
SLACK = 5.0


@dataclass
class Stores:
    """Clients of one server, each behind the same prefix if the kind has one."""

    kind: str
    server: Server | None

    def new(self, timeout: float = 10.0) -> AnyStore:
        """Another client."""
        if self.server is None:
            store: AnyStore = dist.HashStore()
            store.set_timeout(timedelta(seconds=timeout))
            return store
        store = self.server.client(timeout)
        return dist.PrefixStore("job/a", store) if self.kind.endswith("-prefix") else store


def serve(kind: str) -> Iterator[Stores]:
    if kind == "hash":
        yield Stores(kind, None)
        return
    with server(kind.removesuffix("-prefix")) as one:
        yield Stores(kind, one)


@pytest.fixture(params=[*KINDS, "hash"])
def store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    """A store for one client alone."""
    for stores in serve(request.param):
        yield stores.new()


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    """A store for several clients."""
    yield from serve(request.param)


def took(act: Callable[[], object]) -> float:
    """Seconds."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


def fails(kind: type[Exception], act: Callable[[], object], within: float) -> str:
    """The text of the error that it must raise in time."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        act()
    assert time.monotonic() - began < within
    return str(caught.value)


def together(*acts: Callable[[], T]) -> list[T]:
    """What each returned; all at once, each in a thread."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [one.result() for one in [pool.submit(act) for act in acts]]


@pytest.mark.parametrize("value", [b"text", b"", bytes(range(256)), b"\x00", "grüße".encode()])
def test_a_value_comes_back_as_it_was(store: AnyStore, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key") == value
    store.set("key", "another")
    assert store.get("key") == b"another"


@pytest.mark.parametrize("key", ["", "a/b//c", "with space", "schlüssel", "k" * 2000, "a\x00b"])
def test_any_text_is_a_key(store: AnyStore, key: str) -> None:
    assert not store.check([key])
    store.set(key, "1")
    assert store.check([key]) and store.get(key) == b"1"
    assert store.list_keys() == [key]


@pytest.mark.parametrize("mebibytes", [4, 31])
def test_values_of_many_megabytes(stores: Stores, mebibytes: int) -> None:
    if stores.kind.startswith("tcp"):
        mebibytes = min(mebibytes, 7)  # it takes 8 at most
    one, other = stores.new(30), stores.new(30)
    big = os.urandom(1 << 20) * mebibytes
    one.set("big", big)
    assert other.get("big") == big
    keys, values = [f"m{i}" for i in range(8)], [big[: 1 << 20]] * 8
    one.multi_set(keys, values)
    assert other.multi_get(keys) == values


def test_a_missing_key_is_waited_for_and_named(store: AnyStore) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    assert took(lambda: fails(dist.DistStoreError, lambda: store.get("lacking"), SLACK)) > 0.15
    assert took(lambda: fails(dist.DistStoreError, lambda: store.wait(["lacking"]), SLACK)) > 0.15


def test_missing_keys_are_named(stores: Stores) -> None:
    store = stores.new()
    store.set("there", "")
    for act in (
        lambda: store.wait(["there", "lacking", "too"], SHORT),
        lambda: (store.set_timeout(SHORT), store.multi_get(["there", "lacking", "too"])),
        lambda: store.get("lacking"),
    ):
        assert "lacking" in fails(dist.DistStoreError, act, SLACK)
    # The client is as good as before.
    assert store.get("there") == b""


def test_no_keys_are_all_there(stores: Stores) -> None:
    store = stores.new()
    assert store.check([])
    store.wait([])
    assert store.multi_get([]) == []
    store.multi_set([], [])
    assert store.num_keys() == 0


def test_a_wait_ends_with_the_last_key(stores: Stores) -> None:
    waiter, setter = stores.new(), stores.new()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait, ["a", "b", "c"], timedelta(seconds=20))
        for key in ("b", "a", "c"):
            time.sleep(0.05)
            assert not waiting.done()
            setter.set(key, "")
        waiting.result(SLACK)


@pytest.mark.parametrize("how", ["wait", "get", "multi_get", "queue_pop"])
def test_another_process_wakes_who_waits(stores: Stores, how: str) -> None:
    def setter() -> None:
        store = stores.new()
        time.sleep(0.3)
        if how == "queue_pop":
            store.queue_push("late", "value")
        else:
            store.set("late", "value")

    process = servers.run(setter)
    store = stores.new(20)
    began = time.monotonic()
    if how == "wait":
        store.wait(["late"])
    elif how == "get":
        assert store.get("late") == b"value"
    elif how == "multi_get":
        assert store.multi_get(["late"]) == [b"value"]
    else:
        assert store.queue_pop("late") == b"value"
    assert time.monotonic() - began < 15
    servers.end(process)


def test_compare_set(store: AnyStore) -> None:
    # A key that isn't there: written if nothing is expected, else what was expected comes back.
    assert store.compare_set("k", "wrong", "new") == b"wrong"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "", "second") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def test_one_of_many_wins_compare_set(stores: Stores) -> None:
    def race(number: int) -> bool:
        return stores.new().compare_set("k", "", str(number)) == str(number).encode()

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(race, range(6))) == 1


def test_add(store: AnyStore) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    assert store.add("n", 0) == -2
    store.set("n", "41")
    assert store.add("n", 1) == 42
    assert store.add("big", 2**62) == 2**62


def test_add_to_what_is_no_number(stores: Stores) -> None:
    stores.new().set("text", "abc")
    fails(dist.DistError, lambda: stores.new().add("text", 1), SLACK)
    assert stores.new().get("text") == b"abc"


def test_append(store: AnyStore) -> None:
    store.append("log", "one")
    store.append("log", "")
    store.append("log", b"\x00two")
    assert store.get("log") == b"one\x00two"
    store.set("log", "new")
    store.append("log", "er")
    assert store.get("log") == b"newer"


def test_delete(store: AnyStore) -> None:
    store.set("k", "v")
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])
    fails(dist.DistStoreError, lambda: store.wait(["k"], SHORT), SLACK)


def test_many_keys_in_one_call(store: AnyStore) -> None:
    keys = [f"key{i}" for i in range(500)]
    values = [str(i) * (i % 7) for i in range(500)]
    store.multi_set(keys, values)
    assert store.check(keys) and not store.check([*keys, "lacking"])
    assert store.multi_get(keys[::-1]) == [value.encode() for value in values[::-1]]
    assert store.num_keys() == 500


def test_as_many_values_as_keys(stores: Stores) -> None:
    store = stores.new()
    with pytest.raises((ValueError, RuntimeError)):
        store.multi_set(["a", "b"], ["1"])
    assert not stores.new().check(["a"])


def test_counting_and_listing(store: AnyStore) -> None:
    assert store.num_keys() == 0 and store.list_keys() == []
    store.set("a", "")
    store.add("b", 1)
    store.append("c", "")
    assert store.num_keys() == 3
    assert sorted(store.list_keys()) == ["a", "b", "c"]
    store.delete_key("b")
    assert store.num_keys() == 2
    assert sorted(store.list_keys()) == ["a", "c"]


def test_a_prefix_hides_the_rest(stores: Stores) -> None:
    root = stores.new()
    one, two = dist.PrefixStore("one", root), dist.PrefixStore("two", dist.PrefixStore("deep", root))
    one.set("k", "1")
    two.set("k", "2")
    assert (one.get("k"), two.get("k")) == (b"1", b"2")
    assert root.get("one/k") == b"1" and root.get("deep/two/k") == b"2"
    assert one.list_keys() == ["k"] == two.list_keys()
    assert sorted(root.list_keys()) == ["deep/two/k", "one/k"]
    assert one.delete_key("k") and two.check(["k"])


def test_queues(stores: Stores) -> None:
    store = stores.new()
    assert store.queue_len("q") == 0
    for value in ("1", "", "3"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3 and store.check(["q"])
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"", b"3"]
    assert store.queue_len("q") == 0 and not store.check(["q"])
    assert took(lambda: fails(dist.QueueEmptyError, lambda: store.queue_pop("q", False), SLACK)) < 1
    store.set_timeout(SHORT)
    assert took(lambda: fails(dist.DistStoreError, lambda: store.queue_pop("q"), SLACK)) > 0.15


def test_every_value_of_a_queue_goes_to_one(stores: Stores) -> None:
    # TCPStore's pop waits until there is a value and then takes one, if another client hasn't been faster (torch 2.15).
    early = (dist.QueueEmptyError,) if stores.kind.startswith("tcp") else ()

    def pop(_: int) -> list[bytes]:
        store = stores.new(20)
        values: list[bytes] = []
        end = time.monotonic() + 20
        while len(values) < 25:
            assert time.monotonic() < end
            with contextlib.suppress(*early):
                values.append(store.queue_pop("q"))
        return values

    with ThreadPoolExecutor(4) as pool:
        popped = pool.map(pop, range(4))
        pusher = stores.new()
        for number in range(100):
            pusher.queue_push("q", str(number))
        assert sorted(int(value) for values in popped for value in values) == list(range(100))


def test_a_clone_is_the_same_store(stores: Stores) -> None:
    store = stores.new()
    clone = store.clone()
    clone.set("k", "v")
    assert store.get("k") == b"v"
    del store
    assert clone.add("n", 3) == 3
    assert clone.has_extended_api()


def test_a_barrier(stores: Stores) -> None:
    passed = []

    def arrive(number: int) -> None:
        stores.new(20).barrier("all", 3)
        passed.append(number)

    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(arrive, number) for number in range(2)]
        time.sleep(0.2)
        assert passed == []
        for arrival in (*first, pool.submit(arrive, 2)):
            arrival.result(SLACK * 2)
    assert sorted(passed) == [0, 1, 2]


def test_many_threads_on_one_client(store: AnyStore) -> None:
    def work(number: int) -> None:
        for turn in range(100):
            store.add("sum", 1)
            store.set(f"{number}/{turn}", str(turn))
            assert store.get(f"{number}/{turn}") == str(turn).encode()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.add("sum", 0) == 800
    assert store.num_keys() == 801


def test_many_processes(stores: Stores) -> None:
    def rank(number: int) -> bytes:
        store = stores.new(20)
        store.set(f"from{number}", str(number))
        store.wait([f"from{other}" for other in range(4)])
        for _ in range(50):
            store.add("sum", 1)
        store.barrier("end", 4)
        return store.get("sum")

    running = [servers.run(functools.partial(rank, number)) for number in range(4)]
    assert [servers.end(process) for process in running] == [b"200"] * 4


@pytest.mark.parametrize("kind", ["tcp", "podring"])
def test_a_server_that_dies(kind: str) -> None:
    with server(kind) as one:
        store, waiter = one.client(2), one.client(30)
        store.set("k", "v")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: fails(dist.DistError, lambda: waiter.wait(["never"]), SLACK))
            time.sleep(0.2)
            one.kill()
            waiting.result(SLACK * 2)
        together(
            lambda: fails(dist.DistError, lambda: store.get("k"), 2 + SLACK),
            lambda: fails(dist.DistError, lambda: store.add("n", 1), 2 + SLACK),
            lambda: fails(dist.DistError, lambda: store.wait(["k"], SHORT), 2 + SLACK),
        )
        fails(dist.DistNetworkError, lambda: one.client(1), 1 + SLACK)


# What only podring's does, or does better.


@pytest.fixture
def ours() -> Iterator[Server]:
    """A coordinator without a token."""
    with server("podring") as one:
        yield one


def test_a_wait_holds_no_other_thread_up(ours: Server) -> None:
    store = ours.client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["late"], timedelta(seconds=20))
        time.sleep(0.1)
        assert took(lambda: store.set("other", "1")) < 1
        store.set("late", "")
        waiting.result(SLACK)


def test_a_forked_child_uses_its_parents_store(ours: Server) -> None:
    store = ours.client()
    store.set("from", "parent")

    def child() -> bytes:
        value = store.get("from")
        store.set("from", "child")
        return value

    process = servers.run(child)
    store.add("meanwhile", 1)
    assert servers.end(process) == b"parent"
    assert store.get("from") == b"child"


def test_a_value_too_many(ours: Server) -> None:
    store = ours.client(30)
    store.set("k", "v")
    too_long = bytes((32 << 20) + 1)
    assert "over the limit" in fails(dist.DistStoreError, lambda: store.set("k", too_long), 30)
    assert "over the limit" in fails(dist.DistStoreError, lambda: store.set("k" * 5000, ""), SLACK)
    assert store.get("k") == b"v"


def test_a_death_is_named(ours: Server) -> None:
    store = ours.client(1)
    ours.kill()
    acts = (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.multi_set(["a"], ["b"]))
    for text in together(*(functools.partial(fails, dist.DistNetworkError, act, 1 + SLACK) for act in acts)):
        assert f"{HOST}:{ours.port}" in text and "lost the coordinator" in text


def test_a_set_outlives_its_process(ours: Server) -> None:
    """It isn't waited for, but it is on its way when set() returns."""

    def sets() -> None:
        store = ours.client()
        for number in range(100):
            store.set(str(number), "v")
        os._exit(0)

    process = servers.run(sets)
    store = ours.client(20)
    store.wait([str(number) for number in range(100)])
    processes.kill(process)


def test_silence_is_named(ours: Server) -> None:
    store = ours.client(1)
    store.set("k", "v")
    ours.stop()
    try:
        text = fails(dist.DistStoreError, lambda: store.add("n", 1), 1 + SLACK)
        assert "no answer" in text and f"{HOST}:{ours.port}" in text
        fails(dist.DistError, lambda: store.wait(["k"], SHORT), 2 + SLACK)
    finally:
        ours.go_on()
    assert store.get("k") == b"v"


def test_another_life_of_the_coordinator_is_another_store() -> None:
    with server("podring") as first:
        store = first.client(20)
        store.set("k", "v")
        assert store.get("k") == b"v"
        port = first.port
    with server("podring", port=port):
        assert "is lost" in fails(dist.DistStoreError, lambda: store.get("k"), SLACK)


def test_a_set_that_may_be_lost_is_told() -> None:
    with server("podring") as first:
        store = first.client(20)
        # So that it can't take the set in before it is killed.
        first.stop()
        store.set("k", "v")
        port = first.port
    with server("podring", port=port):
        assert "whether a set" in fails(dist.DistNetworkError, lambda: store.check(["k"]), SLACK)
        assert "is lost" in fails(dist.DistStoreError, lambda: store.get("k"), SLACK)


def test_control_c_ends_a_wait(ours: Server) -> None:
    def waits() -> float:
        store = ours.client(60)
        # A shell ignores it for what it starts in the background, and these tests may be that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            store.wait(["never"])
            raise AssertionError("not interrupted")
        return time.monotonic() - began

    seconds = servers.end(servers.run(waits, 60))
    assert isinstance(seconds, float) and seconds < SLACK


TOKEN = "0123456789abcdef-the-right-one"


def test_only_those_with_the_token_come_in() -> None:
    with server("podring", token=TOKEN) as one:
        store = one.client()
        store.set("secret", "v")
        assert "no token given" in fails(dist.DistStoreError, lambda: one.client(5, token=""), SLACK)
        wrong = TOKEN.replace("right", "wrong")
        assert "wrong token" in fails(dist.DistStoreError, lambda: one.client(5, token=wrong), SLACK)
        # By hand: a call without the hello, a hello without the token, garbage. Nothing comes back but a refusal.
        call = b"\x0e\x00\x00\x00\x08\x01\x1a\x0a\x12\x06secret\x18\x01"
        hello = b"\x05\x00\x00\x00\x0a\x031.1"
        for said in (b"podring-store/1\n" + call, b"podring-store/1\n" + hello + call, b"p" + os.urandom(64)):
            with socket.create_connection((HOST, one.port), timeout=SLACK) as raw:
                raw.sendall(said)
                answer = b""
                with contextlib.suppress(OSError):
                    while piece := raw.recv(4096):
                        answer += piece
                assert b"v" not in answer.replace(b"given", b"") and len(answer) < 100
        assert store.get("secret") == b"v"


def test_over_mutual_tls(tmp_path: Path) -> None:
    """With certificates and no token: calls of every kind, a wait that another process ends, and none of others'."""

    def credentials(authority: str) -> Credentials:
        cert, key, ca = certificates(tmp_path, authority)
        return Credentials(tls_ca=str(ca), tls_cert=str(cert), tls_key=str(key))

    right, wrong = credentials("ours"), credentials("theirs")

    def client(known: Credentials, seconds: float = 10) -> AnyStore:
        return podring.Store(HOST, one.port, timeout=timedelta(seconds=seconds), credentials=known)

    with server("podring", credentials=right) as one:
        store = client(right)
        keys, values = ["a", "b"], [b"1", bytes(range(256)) * 1000]
        store.multi_set(keys, values)
        assert store.multi_get(keys) == values and store.check(keys) and store.num_keys() == 2
        assert store.add("n", 2) == 2 and store.compare_set("n", "2", "3") == b"3"
        store.append("a", "2")
        assert dist.PrefixStore("p", store.clone()).num_keys() == 3 and store.get("a") == b"12"
        store.queue_push("q", "v")
        assert store.queue_pop("q") == b"v" and store.delete_key("b") and not store.check(["b"])
        assert "lacking" in fails(dist.DistStoreError, lambda: store.wait(["lacking"], SHORT), SLACK)
        setter = servers.run(lambda: client(right).set("late", "value"))
        store.wait(["late"])
        assert store.get("late") == b"value"
        servers.end(setter)
        for known in (wrong, Credentials(), Credentials(token=TOKEN)):
            fails(dist.DistNetworkError, functools.partial(client, known, 3), 3 + SLACK)
        assert store.get("n") == b"3"


def test_a_master_needs_its_port(ours: Server) -> None:
    def master(share: bool) -> AnyStore:
        return podring.Store(HOST, ours.port, is_master=True, share=share, timeout=timedelta(seconds=5))

    def ends() -> tuple[str, bool]:
        return fails(dist.DistNetworkError, lambda: master(False), SLACK), master(True).serves

    text, serves = servers.end(servers.run(ends))
    assert str(ours.port) in text and not serves


def test_the_master_waits_for_the_others(ours: Server) -> None:
    def master() -> tuple[int, str]:
        def come(port: int) -> None:
            podring.Store(HOST, port, world_size=2)

        port = free_port()
        threading.Timer(0.3, come, (port,)).start()
        first = podring.Store(HOST, port, world_size=2, is_master=True)
        alone = fails(
            dist.DistStoreError,
            lambda: podring.Store(HOST, 0, world_size=2, is_master=True, timeout=SHORT),
            SLACK,
        )
        return first.num_keys(), alone

    keys, text = servers.end(servers.run(master))
    assert keys == 1 and "1 of 2" in text


def test_nobody_there() -> None:
    port = free_port()
    text = fails(dist.DistNetworkError, lambda: podring.Store(HOST, port, timeout=timedelta(seconds=1)), 1 + SLACK)
    assert f"no coordinator at {HOST}:{port}" in text and "refused" in text


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", os.urandom(100)])
def test_something_else_there(said: bytes) -> None:
    def other(pipe: processes.Connection) -> None:
        with socket.create_server((HOST, 0)) as listener:
            pipe.send(listener.getsockname()[1])
            while True:
                connection, _ = listener.accept()
                # Who called may be gone already, and calls again.
                with connection, contextlib.suppress(OSError):
                    connection.recv(16)
                    connection.sendall(said)

    directory = tempfile.mkdtemp(prefix="podring-store-")
    process = processes.fork(other, Path(directory) / "log", 60)
    try:
        port = process.pipe.recv()

        def connects() -> str:
            return fails(
                dist.DistNetworkError, lambda: podring.Store(HOST, port, timeout=timedelta(seconds=1)), 1 + SLACK
            )

        # Not here: who looks so closely starts threads, and other tests fork from this process.
        text = servers.end(servers.run(connects))
        assert "is no podring coordinator" in text, text
    finally:
        processes.kill(process)
        shutil.rmtree(directory)


@pytest.mark.parametrize("arguments", [{"port": 0}, {"port": 65536}, {"port": 1, "token": "short"}])
def test_arguments_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        podring.Store(HOST, **arguments)


def test_certificates_come_together() -> None:
    with pytest.raises(ValueError, match="expected CA, certificate and key"):
        podring.Store(HOST, 1, credentials=Credentials(tls_ca="ca.pem"))
