"""The face alone, over the mock core: one process that plays rank 1 of 4. Run by test_face.py as a program.

Each function `check_*` is one test; the program prints {name: "" or traceback} as JSON.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RANK, SIZE = 1, 4
TIMEOUT, LOST, MISMATCH, ABORTED, STORE, NETWORK, INTERNAL = 3, 4, 5, 6, 7, 8, 9
INVALID, UNSUPPORTED = 1, 2

mock: ctypes.CDLL


def install(library: str) -> None:
    """Puts the mock where `podring._core` would be."""
    global mock
    mock = ctypes.CDLL(library)
    mock.mock_record.restype = ctypes.c_char_p
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = ctypes.create_string_buffer(b"podring._core.abi")
    fake = types.ModuleType("podring._core")
    fake.__dict__.update(
        __version__="mock",
        abi=new_capsule(ctypes.addressof(ctypes.c_char.in_dll(mock, "mock_core")), name, None),
        _name=name,
    )
    sys.modules["podring._core"] = fake
    from podring import _register

    _register.register()


def record() -> list[str]:
    """What the core was asked since the last call."""
    lines = mock.mock_record().decode().splitlines()
    mock.mock_clear()
    return lines


@contextmanager
def pending() -> Iterator[None]:
    """Operations posted within stay under way until mock_end."""
    mock.mock_pending(1)
    try:
        yield
    finally:
        mock.mock_pending(0)
        mock.mock_end(0)


def alive() -> tuple[int, int, int]:
    """Works, groups and stores that the face still holds."""
    counts = [ctypes.c_int() for _ in range(3)]
    mock.mock_alive(*(ctypes.byref(count) for count in counts))
    return counts[0].value, counts[1].value, counts[2].value


def posts(call: Callable[[], object]) -> list[str]:
    """What `call` posts, without what all lines have in common."""
    record()
    call()
    return [line.removeprefix("post ").replace(" timeout 0", "") for line in record()]


def raises(kind: type[BaseException], pattern: str, call: Callable[[], object]) -> BaseException:
    """`call` raises exactly this type with a message that matches."""
    try:
        call()
    except BaseException as error:
        assert type(error) is kind, f"expected {kind}, got {type(error)}: {error}"
        assert re.search(pattern, str(error)), f"expected {pattern!r} in: {error}"
        return error
    raise AssertionError(f"expected {kind}")


# Torch's annotations know neither groups of which one is a member nor the private calls.
new_group: Any = dist.new_group
split_group: Any = dist.split_group


def default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def backend() -> Any:
    return default_group()._get_backend(torch.device("cpu"))


def same(got: object, expected: object) -> None:
    assert got == expected, f"expected {expected!r}, got {got!r}"


def check_forming() -> None:
    record()
    group = new_group([1, 3], timeout=timedelta(seconds=7), group_desc="pair")
    line, store = record()
    name = group.group_name
    same(line, f"group {name} rank 0 of 2 timeout 7000 members 1 3")
    same(store, "a=x;store ok 1 0 5 ")
    same((group.rank(), group.size()), (0, 2))
    options = group._get_backend(torch.device("cpu")).options
    same((options.backend, options._timeout, options.group_name), ("tpu", timedelta(seconds=7), name))
    dist.destroy_process_group(group)
    same(record(), ["shutdown"])


def check_forming_fails() -> None:
    before = alive()
    mock.mock_fail_create(TIMEOUT)
    try:
        raises(dist.DistBackendError, "told to fail", lambda: new_group([1, 2]))
    finally:
        mock.mock_fail_create(0)
    gc.collect()
    same(alive(), before)


def check_ordered_store() -> None:
    from podring import _register

    store = dist.PrefixStore("deep", dist.PrefixStore("group", dist.HashStore()))
    # Both sides of a job have one, over the same store.
    receiver: Any = _register.face().ordered_store(store)
    sender: Any = _register.face().ordered_store(store)
    key = "cross_host_transfer_descriptor:17"
    for place in range(3):
        receiver.set(key, f"receive {place}")
    receiver.multi_set([key, "else"], ["receive 3", "value"])
    for place in range(3):
        sender.wait([key], timedelta(seconds=5))
        assert sender.check([key])
        assert sender.get(key) == f"receive {place}".encode(), place
    assert sender.multi_get([key, "else"]) == [b"receive 3", b"value"]
    # The next one hasn't been written, and the former are gone.
    assert not sender.check([key]) and sender.check(["else"])
    try:
        sender.wait([key], timedelta(milliseconds=10))
    except dist.DistStoreError:
        pass
    else:
        raise AssertionError("a receive that isn't there was found")
    # A clone goes on where it is.
    receiver.clone().set(key, "receive 4")
    receiver.set(key, "receive 5")
    assert (sender.clone().get(key), sender.get(key)) == (b"receive 4", b"receive 5")
    # Everything else is the store's own.
    assert store.get("else") == b"value" and sender.add("number", 2) == 2 and store.add("number", 1) == 3
    plain = dist.HashStore()
    assert _register.face().ordered_store(plain) is plain


def check_reductions() -> None:
    t = torch.ones(2, 3)
    same(
        posts(lambda: dist.all_reduce(t)),
        ["0 root -1 tag 0 flags 1 | dtype 11 red 0 factor 0 in [2/3 3/1] out [2/3 3/1]"],
    )
    same(
        posts(lambda: dist.all_reduce(t.t(), dist.ReduceOp.MAX, async_op=True).wait()),
        ["0 root -1 tag 0 flags 0 | dtype 11 red 4 factor 0 in [3/1 2/3] out [3/1 2/3]"],
    )
    half = dist._make_nccl_premul_sum(0.5)
    same(
        posts(lambda: dist.all_reduce(t, half)),
        ["0 root -1 tag 0 flags 1 | dtype 11 red 8 factor 0.5 in [2/3 3/1] out [2/3 3/1]"],
    )
    third = dist._make_nccl_premul_sum(torch.tensor([0.25], dtype=torch.float64))
    assert "factor 0.25" in posts(lambda: dist.all_reduce(t, third))[0]
    same(
        posts(lambda: dist.reduce(t, 1)),
        ["2 root 1 tag 0 flags 1 | dtype 11 red 0 factor 0 in [2/3 3/1] out [2/3 3/1]"],
    )
    same(posts(lambda: dist.reduce(t, 2)), ["2 root 2 tag 0 flags 1 | dtype 11 red 0 factor 0 in [2/3 3/1] out"])
    same(
        posts(lambda: dist.broadcast(t, 3)),
        ["1 root 3 tag 0 flags 1 | dtype 11 red 255 factor 0 in [2/3 3/1] out [2/3 3/1]"],
    )
    same(
        posts(lambda: dist.all_reduce_coalesced([torch.ones(1), torch.ones(())])),
        ["0 root -1 tag 0 flags 1 | dtype 11 red 0 factor 0 in [1/1] out [1/1] | dtype 11 red 0 factor 0 in [] out []"],
    )
    parts = [torch.ones(5) for _ in range(SIZE)]
    same(
        posts(lambda: dist.reduce_scatter(torch.ones(5), parts)),
        ["4 root -1 tag 0 flags 1 | dtype 11 red 0 factor 0 in [5/1],[5/1],[5/1],[5/1] out [5/1]"],
    )
    same(
        posts(lambda: dist.reduce_scatter_tensor(torch.ones(2, 3), torch.ones(8, 3), dist.ReduceOp.AVG)),
        ["4 root -1 tag 0 flags 1 | dtype 11 red 1 factor 0 in [8/3 3/1] cut 6+6+6+6 out [2/3 3/1]"],
    )


def check_gathers() -> None:
    t = torch.ones(3)
    lists = [torch.ones(3) for _ in range(SIZE)]
    common = "tag 0 flags 1 | dtype 11 red 255 factor 0"
    same(posts(lambda: dist.all_gather(lists, t)), [f"3 root -1 {common} in [3/1] out [3/1],[3/1],[3/1],[3/1]"])
    for shape in ((12,), (4, 3)):
        line = posts(functools.partial(dist.all_gather_into_tensor, torch.ones(shape), t))[0]
        assert line.startswith(f"3 root -1 {common} in [3/1] out [") and line.endswith("] cut 3+3+3+3"), line
    same(posts(lambda: dist.gather(t, lists, dst=RANK)), [f"6 root 1 {common} in [3/1] out [3/1],[3/1],[3/1],[3/1]"])
    same(posts(lambda: dist.gather(t, dst=0)), [f"6 root 0 {common} in [3/1] out"])
    same(posts(lambda: dist.scatter(t, lists, src=RANK)), [f"7 root 1 {common} in [3/1],[3/1],[3/1],[3/1] out [3/1]"])
    same(posts(lambda: dist.scatter(t, src=0)), [f"7 root 0 {common} in out [3/1]"])
    if hasattr(dist, "gather_single"):
        same(
            posts(lambda: dist.gather_single(t, torch.ones(12), dst=RANK)),
            [f"6 root 1 {common} in [3/1] out [12/1] cut 3+3+3+3"],
        )
        same(posts(lambda: dist.gather_single(t, dst=0)), [f"6 root 0 {common} in [3/1] out"])
    outputs = [[torch.ones(1), torch.ones(2)] for _ in range(SIZE)]
    same(
        posts(lambda: dist.all_gather_coalesced(outputs, [torch.ones(1), torch.ones(2)])),
        [
            "3 root -1 tag 0 flags 1 | dtype 11 red 255 factor 0 in [1/1] out [1/1],[1/1],[1/1],[1/1]"
            " | dtype 11 red 255 factor 0 in [2/1] out [2/1],[2/1],[2/1],[2/1]"
        ],
    )


def check_all_to_all() -> None:
    same(
        posts(lambda: dist.all_to_all_single(torch.ones(4, 2), torch.ones(8), [1, 0, 2, 1], [2, 2, 2, 2])),
        ["5 root -1 tag 0 flags 1 | dtype 11 red 255 factor 0 in [8/1] cut 2+2+2+2 out [4/2 2/1] cut 2+0+4+2"],
    )
    same(
        posts(lambda: dist.all_to_all_single(torch.ones(4, 2), torch.ones(4, 2))),
        ["5 root -1 tag 0 flags 1 | dtype 11 red 255 factor 0 in [4/2 2/1] cut 2+2+2+2 out [4/2 2/1] cut 2+2+2+2"],
    )
    same(
        posts(lambda: dist.all_to_all_single(torch.ones(0, 2), torch.ones(0, 2))),
        [
            "5 root -1 tag 0 flags 1 | dtype 11 red 255 factor 0"
            " in [0/2 2/1]null cut 0+0+0+0 out [0/2 2/1]null cut 0+0+0+0"
        ],
    )
    inputs = [torch.ones(i) for i in range(SIZE)]
    line = posts(lambda: dist.all_to_all([torch.ones(1) for _ in range(SIZE)], inputs))[0]
    same(
        line,
        "5 root -1 tag 0 flags 1 | dtype 11 red 255 factor 0"
        " in [0/1]null,[1/1],[2/1],[3/1] out [1/1],[1/1],[1/1],[1/1]",
    )


def check_views() -> None:
    t = torch.ones(2, 2, dtype=torch.complex64)

    def allreduce(tensor: torch.Tensor) -> None:
        backend().allreduce([tensor]).wait()

    assert "dtype 13 red 0 factor 0 in [2/2 2/1]flags1 " in posts(lambda: allreduce(t.conj()))[0]
    assert "dtype 11 red 0 factor 0 in [2/4 2/2]flags2 " in posts(lambda: allreduce(t.conj().imag))[0]
    assert " in [5/0] out [5/0]" in posts(lambda: allreduce(torch.ones(1).expand(5)))[0]


def check_dtypes() -> None:
    kinds = (
        "uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex64 complex128"
    )
    kinds += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex32"
    for number, kind in enumerate(kinds.split()):
        line = posts(functools.partial(backend().broadcast, [torch.empty(2, dtype=getattr(torch, kind))]))[0]
        assert f"dtype {number} " in line, (kind, line)
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    raises(NotImplementedError, "broadcast on rank 1 of 4 .*QInt8", lambda: backend().broadcast([quantized]))


def check_refusals() -> None:
    t = torch.ones(3)
    b = backend()
    here = r"on rank 1 of 4 \(group \w+\): "
    raises(NotImplementedError, f"all_reduce {here}.*cpu.*meta", lambda: b.allreduce([t.to("meta")]))
    raises(NotImplementedError, f"broadcast {here}.*dense.*Sparse", lambda: b.broadcast([t.to_sparse()]))
    raises(NotImplementedError, f"sparse_all_reduce {here}.*SUM only", lambda: _sparse_max(b, t))
    raises(ValueError, f"all_reduce {here}expected 1 tensor, got 2", lambda: b.allreduce([t, t]))
    raises(ValueError, f"broadcast {here}invalid root rank: 4 .expected 0 to 3", lambda: _broadcast(b, t, 4, 0))
    raises(ValueError, f"broadcast {here}invalid root tensor: 1", lambda: _broadcast(b, t, 0, 1))
    raises(
        ValueError,
        f"all_gather {here}expected 4 output tensors, one per rank, got 3",
        lambda: b.allgather([[t] * 3], [t]),
    )
    raises(
        TypeError, f"all_gather {here}expected dtype Float .*got Double", lambda: b.allgather([[t.double()] * 4], [t])
    )
    raises(
        ValueError,
        f"all_gather_into_tensor {here}expected 12 elements, 4 times those of shape \\[3\\], got 9 of shape \\[3, 3\\]",
        lambda: dist.all_gather_into_tensor(torch.ones(3, 3), t),
    )
    single: Any = dist.all_to_all_single
    raises(
        ValueError, f"all_to_all {here}dimension 0 of the input .3. does not divide", lambda: single(t, t, None, None)
    )
    raises(ValueError, "expected 4 input splits, one per rank, got 3", lambda: single(t, t, [3, 0, 0, 0], [1, 1, 1]))
    raises(
        ValueError,
        "the output splits sum to 4 rows, dimension 0 of the output is 3",
        lambda: single(t, t, [4, 0, 0, 0], [3, 0, 0, 0]),
    )
    raises(ValueError, "expected input splits of 0 or more rows, got -1", lambda: single(t, t, None, [-1, 4, 0, 0]))
    raises(ValueError, "at least one dimension", lambda: single(torch.ones(()), torch.ones(()), None, None))
    raises(ValueError, f"send {here}invalid destination rank: 9", lambda: b.send([t], 9, 0))
    raises(ValueError, f"recv {here}invalid tag: -1", lambda: b.recv([t], 0, -1))
    raises(ValueError, f"gather {here}expected 0 output lists", lambda: _gather(b, [[t] * 4], t, 0))


def _sparse_max(b: Any, t: torch.Tensor) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    b.allreduce([t.to_sparse()], options)


def _broadcast(b: Any, t: torch.Tensor, root: int, tensor: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, tensor
    b.broadcast([t], options)


def _gather(b: Any, outputs: list[list[torch.Tensor]], t: torch.Tensor, root: int) -> None:
    options = dist.GatherOptions()
    options.rootRank = root
    b.gather(outputs, [t], options)


def check_point_to_point() -> None:
    t = torch.ones(3)
    same(posts(lambda: dist.send(t, 3, tag=7)), ["9 root 3 tag 7 flags 0 | dtype 11 red 255 factor 0 in [3/1] out"])
    same(posts(lambda: dist.recv(t, 2)), ["10 root 2 tag 0 flags 0 | dtype 11 red 255 factor 0 in out [3/1]"])
    same(posts(lambda: same(dist.recv(t), 0)), ["10 root -1 tag 0 flags 0 | dtype 11 red 255 factor 0 in out [3/1]"])


def check_barriers() -> None:
    same(posts(lambda: dist.barrier()), ["8 root -1 tag 0 flags 1"])
    record()
    dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)
    same(record(), ["monitored_barrier 2000 1"])
    raises(dist.DistBackendError, "told to fail", lambda: dist.monitored_barrier(timeout=timedelta(seconds=0)))


def check_timeouts() -> None:
    b = backend()
    b.set_timeout(timedelta(seconds=11))
    same(b.options._timeout, timedelta(seconds=11))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=1500)
    record()
    work = b.allreduce([torch.ones(1)], options)
    assert "timeout 1500 " in record()[0]
    same(work.timeout, timedelta(milliseconds=1500))
    same(b.allreduce([torch.ones(1)]).timeout, timedelta(seconds=11))


def check_batches() -> None:
    t = [torch.ones(i + 1) for i in range(3)]
    cpu = torch.device("cpu")

    def collectives() -> None:
        with dist.distributed_c10d._coalescing_manager(device=cpu):
            dist.broadcast(t[0], 0)
            dist.broadcast(t[1], 0)
            dist.broadcast(t[2], 2)
            assert record() == []

    broadcast = "dtype 11 red 255 factor 0 in [{0}/1] out [{0}/1]"
    same(
        posts(collectives),
        [
            f"1 root 0 tag 0 flags 0 | {broadcast.format(1)} | {broadcast.format(2)}",
            f"1 root 2 tag 0 flags 0 | {broadcast.format(3)}",
        ],
    )
    with pending():
        record()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t[0], 2), dist.P2POp(dist.irecv, t[1], 2)])
        same([line.split()[1] for line in record()], ["9", "10"])
        same(len(works), 1)
        assert not works[0].is_completed()
        mock.mock_end_later(100)
        works[0].wait()
        assert works[0].is_completed() and works[0].is_success()
        same([len(x) for x in works[0].result()], [2])
    # A call that fails ends the batch: what comes after is not held back.
    group = default_group()
    group._start_coalescing(cpu)
    group.send([t[0]], 2, 0)
    raises(ValueError, "invalid tag", lambda: group.send([t[0]], 2, -1))
    same(len(posts(lambda: group.broadcast(t[0], 0).wait())), 1)
    raises(ValueError, "no batch is open", lambda: group._end_coalescing(cpu))
    # So does a new one, which says that collectives of the one before were dropped.
    group._start_coalescing(cpu)
    same(posts(lambda: group.broadcast(t[0], 0)), [])
    raises(ValueError, "never ended", lambda: group._start_coalescing(cpu))
    same(len(posts(lambda: group.broadcast(t[0], 0).wait())), 1)


def check_coalesced_fast_path() -> None:
    def gather() -> None:
        with dist.distributed_c10d._coalescing_manager():
            dist.all_gather_into_tensor(torch.ones(4), torch.ones(1))
            dist.all_gather_into_tensor(torch.ones(8), torch.ones(2))

    (line,) = posts(gather)
    same(line.count(" | "), 2)
    assert line.endswith("out [8/1] cut 2+2+2+2"), line


def check_futures() -> None:
    t = torch.ones(2)
    done = backend().allreduce([t]).get_future()
    assert done.done()
    assert done.value()[0].data_ptr() == t.data_ptr()
    with pending():
        work = dist.all_reduce(t, async_op=True)
        future = work.get_future()
        seen: list[int] = []

        def called_back(ended: Any) -> int:
            seen.append(threading.get_ident())
            return len(ended.value())

        then = future.then(called_back)
        assert not future.done() and not work.is_completed()
        mock.mock_end(0)
        same(then.wait(), 1)
        assert seen and seen[0] != threading.get_ident()
        assert work.is_completed() and work.is_success() and work.exception() is None
    with pending():
        work = dist.all_reduce(t, async_op=True)
        future = work.get_future()
        mock.mock_end(LOST)
        raises(dist.DistBackendError, "told to fail", future.wait)
        assert work.is_completed() and not work.is_success()
        raises(dist.DistBackendError, "told to fail", work.wait)
        raises(dist.DistBackendError, "told to fail", work.get_future().wait)


def check_error_kinds() -> None:
    kinds = {
        INVALID: ValueError,
        UNSUPPORTED: NotImplementedError,
        TIMEOUT: dist.DistBackendError,
        LOST: dist.DistBackendError,
        MISMATCH: dist.DistBackendError,
        ABORTED: dist.DistBackendError,
        STORE: dist.DistStoreError,
        NETWORK: dist.DistNetworkError,
        INTERNAL: dist.DistBackendError,
        99: dist.DistBackendError,
    }
    for status, kind in kinds.items():
        mock.mock_fail_post(status)
        try:
            error = raises(kind, "^the mock was told to fail$", lambda: dist.all_reduce(torch.ones(1)))
            assert isinstance(error, (RuntimeError, ValueError))
        finally:
            mock.mock_fail_post(0)
    gc.collect()
    same(alive()[0], 0)


def check_wait_releases_the_lock() -> None:
    counted = [0]

    def count() -> None:
        for _ in range(50):
            counted[0] += 1
            time.sleep(0.001)
        mock.mock_end_later(0)

    thread = threading.Thread(target=count, daemon=True)
    with pending():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        thread.start()
        # Ended by the thread, which needs the lock for every step.
        work.wait()
    thread.join(10)
    same(counted[0], 50)


def check_wait_for_a_while() -> None:
    with pending():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raises(dist.DistBackendError, "told to fail", lambda: work.wait(timedelta(milliseconds=100)))
        assert not work.is_completed()
        mock.mock_end_later(50)
        work.wait()


def check_ctrl_c() -> None:
    # A shell ignores it for what it starts in the background, and these tests may be that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGINT, signal.SIGALRM):
        previous = signal.signal(signal.SIGALRM, _alarm)
        try:
            with pending():
                work = dist.all_reduce(torch.ones(1), async_op=True)
                timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
                timer.start()
                started = time.monotonic()
                raises(KeyboardInterrupt if number == signal.SIGINT else ArithmeticError, "", work.wait)
                assert time.monotonic() - started < 1.2
                timer.join(10)
                mock.mock_end_later(50)
                work.wait()  # it is under way still
        finally:
            signal.signal(signal.SIGALRM, previous)


def _alarm(number: int, frame: object) -> None:
    raise ArithmeticError("alarm")


def check_wait_on_another_thread() -> None:
    with pending():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        mock.mock_end_later(200)
        thread.join(10)
        assert not thread.is_alive() and not failed, failed


def check_keeping_alive() -> None:
    with pending():
        tensor = torch.ones(3).as_subclass(Marked)
        gone = weakref.ref(tensor)
        work = backend().allreduce([tensor])
        del tensor, work
        gc.collect()
        same(alive()[0], 1)  # the operation's own
        mock.mock_end(0)  # on another thread: takes the interpreter lock if it must
        gc.collect()
        assert gone() is None
    same(alive()[0], 0)


def check_numbers() -> None:
    b = backend()
    before = default_group()._get_sequence_number_for_group()
    first, second = b.allreduce([torch.ones(1)]), b.allreduce([torch.ones(1)])
    same(second._get_sequence_number() - first._get_sequence_number(), 1)
    b._set_sequence_number_for_group()
    same(default_group()._get_sequence_number_for_group(), before + 2)
    same(b.name(), "tpu")
    same(dist.get_backend(), "tpu")
    assert b.supports_splitting and b.supports_coalescing


def check_memory_stats() -> None:
    stats = backend().memory_stats
    same(stats() if callable(stats) else stats, {"shared": 4096, "private": 17})


def check_bound_device() -> None:
    """A group bound to a device: subgroups that leave this rank out are no business of its."""
    group = default_group()
    group.bound_device_id = torch.device("cpu:0")
    try:
        record()
        assert new_group([0, 2]) is dist.GroupMember.NON_GROUP_MEMBER
        same(record(), [])
        dist.destroy_process_group(new_group([1, 2]))
        assert "members 1 2" in record()[0]
    finally:
        group.bound_device_id = None


def check_split() -> None:
    record()
    child = split_group(split_ranks=[[0, 2], [3, 1]], timeout=timedelta(seconds=5))
    forming = record()[0]
    assert re.fullmatch(r"group \S+ rank \d of 2 timeout 5000 members (1 3|3 1)", forming), forming
    same(child.size(), 2)
    line = posts(lambda: dist.all_reduce(torch.ones(1), group=child))[0]
    assert line.startswith("0 root"), line
    dist.destroy_process_group(child)


def check_abort_and_shutdown() -> None:
    group = new_group([1, 2])
    b = group._get_backend(torch.device("cpu"))
    same(b.get_error().name, "SUCCESS")
    with pending():
        work = b.allreduce([torch.ones(1)])
        record()
        b.abort()
        same(record(), ["abort abort() was called on rank 0"])
        raises(dist.DistBackendError, "told to fail", work.wait)
    same(b.get_error().name, "COMM_ERROR")
    before = alive()
    dist.destroy_process_group(group)
    after = functools.partial(b.allreduce, [torch.ones(1)])
    raises(dist.DistBackendError, "all_reduce on rank 0 of 2 .*shut down", after)
    del after, group, b, work
    gc.collect()
    same(alive()[1], before[1] - 1)


def check_profiler() -> None:
    t = torch.ones(2, 5)

    with torch.autograd.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(t)
        dist.all_gather([torch.ones(1) for _ in range(SIZE)], torch.ones(1))
        dist.recv(t, 2)
    found: dict[str, list[Any]] = {}
    for event in profiler.function_events:
        found.setdefault(event.name, []).append(event)
    for name, shapes in (("tpu:all_reduce", [[2, 5]]), ("tpu:all_gather", [[1]]), ("tpu:recv", [[2, 5]])):
        same(len(found[name]), 1)
        same([list(shape) for shape in found[name][0].input_shapes], shapes)
        assert found[name][0].is_async
    same(len(found["record_param_comms"]), 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof, pending():
        dist.all_reduce(t, async_op=True)
        mock.mock_end(0)
    assert any(event.name == "tpu:all_reduce" for event in prof.events())


def check_wrong_options() -> None:
    if dist.is_nccl_available():
        raises(
            TypeError,
            "takes pg_options of type",
            lambda: new_group([1, 2], pg_options=dist.ProcessGroupNCCL.Options()),
        )
    given = dist.distributed_c10d.C10DBackend.Options("tpu", timedelta(seconds=1))
    group = new_group([1, 2], pg_options=given, timeout=timedelta(seconds=3))
    same(group._get_backend(torch.device("cpu")).options._timeout, timedelta(seconds=3))
    same(given._timeout, timedelta(seconds=1))
    dist.destroy_process_group(group)


def check_another_torch() -> None:
    from podring import _register

    _register.face.cache_clear()
    version = torch.__version__
    torch.__version__ = "2.99.1+cpu"  # type: ignore[assignment]
    try:
        raises(RuntimeError, r"no face for torch 2\.99\.1\+cpu, only for torch 2\.\d+", lambda: new_group([1, 2]))
    finally:
        torch.__version__ = version
    same(_register.torch_minor("2.15.0a0+git123"), "2.15")
    dist.destroy_process_group(new_group([1, 2]))


def check_allocations() -> None:
    """A synchronous call makes one heap object, the work, and gives it back: memory stands still."""
    t = torch.ones(1)
    mock.mock_silent(1)
    try:
        for _ in range(2000):
            dist.all_reduce(t)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        for _ in range(20000):
            dist.all_reduce(t)
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finally:
        mock.mock_silent(0)
    print(f"all_reduce over the mock: {seconds / 20000 * 1e6:.1f} us", file=sys.stderr)
    assert after - before < 256, f"grew by {after - before} KiB"
    same(alive()[0], 0)


class Marked(torch.Tensor):
    """A tensor with a Python object of its own: its last reference can't go without the interpreter lock."""


def leave(how: str) -> int:
    """Ends the program without destroy_process_group, with an operation under way. The exit code is to stay 7."""
    mock.mock_pending(1)
    work = backend().allreduce([torch.ones(3).as_subclass(Marked)])
    work.get_future().then(lambda future: print("called back"))
    del work
    if how == "ended-late":
        # Runs after podring's own: the operation ends on a thread that must not enter the interpreter any more.
        atexit_before_ours.append(lambda: mock.mock_end(0))
    elif how == "ended-in-finalization":
        # As before, but now CPython kills a thread that wants its lock, and with it the process.
        sys.modules["last"] = Last("last", mock.mock_end)
    elif how == "forked":
        child = os.fork()
        if child == 0:
            return 7
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 7


class Last(types.ModuleType):
    """A module that acts when the interpreter clears it away."""

    def __init__(self, name: str, act: Callable[[int], object]) -> None:
        super().__init__(name)
        self.act = act

    def __del__(self) -> None:
        self.act(0)


atexit_before_ours: list[Callable[[], object]] = []


def main(library: str, how: str = "") -> int:
    atexit.register(lambda: [call() for call in atexit_before_ours])
    install(library)
    dist.init_process_group("tpu", store=dist.HashStore(), rank=RANK, world_size=SIZE)
    if how:
        return leave(how)
    results = {}
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        try:
            check()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
