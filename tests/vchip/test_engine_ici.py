"""PODRING_ENGINE=ici on a virtual slice: collectives of tpu tensors run as programs on torch_tpu's client, one process
per device, and the fabric plays them. The numbers are those of CPU tensors.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

from tests.processes import run_program
from tests.vchip import jobs

# The scenarios of test_scenarios.py, over the other engine. Every program is compiled: those with many take long.
QUICK = [
    "movements",
    "aliases_keep_their_values",
    "asynchronous",
    "future_callbacks",
    "coalesced",
    "ddp",
    "ddp_compressed",
    "fsdp2",
    "tensor_parallel",
]
ALL = [
    *QUICK,
    "reductions",
    "point_to_point",
    "layouts",
    "deferred_values",
    "objects",
    "monitored_barrier",
    "refusals",
    "functional_eager",
    "memory_stays_flat",
    "wide_and_narrow_types",
    "compiled_collectives",
    "compiled_but_split",
    "twins_end_with_their_groups",
    "device_facts",
    "eager_training",
    "sync_batch_norm",
    "hsdp",
    "dtensor",
    "checkpoint",
    "checkpoint_in_background",
    "pipeline",
    "compiled_training",
]


@functools.cache
def job(ranks: int) -> dict[str, jobs.Said]:
    names = ALL if os.environ.get("PODRING_VCHIP_ALL") else QUICK
    return jobs.run_scenarios(names, ranks, {2: "v5e:1x2", 4: "v5e:2x2"}[ranks], PODRING_ENGINE="ici")


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(name: str) -> None:
    job(2)[name].check(name)


@jobs.thorough
@pytest.mark.parametrize("name", ALL[len(QUICK) :])
def test_more_on_two_ranks(name: str) -> None:
    job(2)[name].check(name)


@jobs.thorough
@pytest.mark.parametrize("name", ALL)
def test_four_ranks(name: str) -> None:
    job(4)[name].check(name)


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text("import os, signal, sys, time\n" + textwrap.dedent(text))
    return path


def test_what_runs_as_a_program_is_counted(tmp_path: Path) -> None:
    # All four chips of the slice, and groups of some of them.
    program = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from podring import _core
        dist.init_process_group("tpu")
        rank, size = dist.get_rank(), dist.get_world_size()
        assert _core.engine_counts()["launched"] == 0

        def launched(act):
            before = _core.engine_counts()["launched"]
            act()
            return _core.engine_counts()["launched"] - before

        one = torch.full((1000,), float(rank + 1), device="tpu")
        assert launched(lambda: dist.all_reduce(one)) == 1
        assert one.cpu().tolist() == [10.0] * 1000
        out = torch.zeros(4000, device="tpu")
        assert launched(lambda: dist.all_gather_into_tensor(out, one)) == 1
        # Two calls of one batch are one program.
        def batch():
            with dist._coalescing_manager(device=one.device):
                dist.all_reduce(one)
                dist.all_reduce(out)
        assert launched(batch) == 1
        assert one.cpu().tolist() == [40.0] * 1000 and out.cpu().tolist() == [40.0] * 4000
        assert launched(lambda: dist.barrier(device_ids=[0])) == 1
        # Each program was compiled by one rank, and the others have it from that one.
        counts = _core.engine_counts()
        compiled, received = counts["compiled"], counts["received"]
        programs = compiled + received
        counts = torch.tensor([compiled, received, _core.program_counts()["loaded"]])
        dist.all_reduce(counts)
        assert programs >= 4 and counts.tolist() == [programs, 3 * programs, 3 * programs], (programs, counts)
        # The same program again: nothing is compiled.
        assert launched(lambda: [dist.all_reduce(one) for _ in range(5)]) == 5
        assert _core.engine_counts()["compiled"] == compiled
        # Tensors of the host's memory, barriers and messages go over the fabric.
        host = torch.full((10,), float(rank))
        after, before = (rank + 1) % size, (rank - 1) % size
        def on_the_fabric():
            dist.all_reduce(host)
            dist.barrier()
            works = [dist.irecv(one, before), dist.isend(out[:1000], after)]
            for work in works:
                work.wait()
        assert launched(on_the_fabric) == 0
        assert host.tolist() == [6.0] * 10
        # Some of the ranks, in both directions.
        groups = [dist.new_group([0, 1]), dist.new_group([3, 1]), dist.new_group([0, 2, 3])]
        for ranks, group in zip(([0, 1], [3, 1], [0, 2, 3]), groups):
            if rank in ranks:
                tensor = torch.full((7,), float(rank), device="tpu")
                assert launched(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)) == 1
                assert tensor.cpu().tolist() == [float(max(ranks))] * 7
                parts = [torch.zeros(2, device="tpu") for _ in ranks]
                mine = torch.full((2,), float(rank), device="tpu")
                assert launched(lambda: dist.all_gather(parts, mine, group=group)) == 1
                assert [part.cpu().tolist() for part in parts] == [[float(one)] * 2 for one in sorted(ranks)]
        # What was compiled ahead isn't compiled when it is called.
        import podring
        most, ready = dist.ReduceOp.MAX, []
        asked = [("all_reduce", torch.float32, 400_000, most), ("all_gather", torch.bfloat16, 400_000),
               ("reduce_scatter_tensor", torch.float32, 400_000), ("all_to_all", torch.float32, 400_000),
               ("broadcast", torch.float32, 400_000)]
        before = _core.engine_counts()
        assert launched(lambda: ready.append(podring.warm_up(None, asked))) == 0 and ready == [len(asked)]
        ahead = _core.engine_counts()
        known = lambda counts: sum(counts[how] for how in ("compiled", "received", "loaded"))
        assert known(ahead) - known(before) == len(asked), (before, ahead)
        large, small = torch.ones(100_000, device="tpu"), torch.ones(25_000, device="tpu")
        dist.all_reduce(large, most)
        halves = [torch.ones(200_000 // ranks, device="tpu", dtype=torch.bfloat16) for ranks in (1, size)]
        dist.all_gather_into_tensor(*halves)
        dist.reduce_scatter_tensor(small, large)
        dist.all_to_all_single(large, torch.ones(100_000, device="tpu"))
        dist.broadcast(large, 2)
        assert small.cpu().tolist() == [4.0] * 25_000
        assert known(_core.engine_counts()) == known(ahead), (ahead, _core.engine_counts())
        for wrong in [("all_reduec", torch.float32, 8), ("gather", torch.float32, 8), ("all_reduce", float, 8)]:
            try:
                podring.warm_up(None, [asked[0], wrong])
                raise AssertionError(wrong)
            except ValueError as error:
                assert "call 1: expected " in str(error), error
        dist.barrier()
        dist.destroy_process_group()
        # And once more, from the beginning.
        dist.init_process_group("tpu")
        assert launched(lambda: dist.all_reduce(one)) == 1
        # A call returns before the others have come: rank 1 does so when rank 0's has.
        one = torch.ones(1000, device="tpu")
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["called"])
        work = dist.all_reduce(one, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            store.set("called", "")
        work.wait()
        assert one.cpu().tolist() == [4.0] * 1000
        os.write(1, f"FINE {rank}\\n".encode())
        # A deadline, and who has not come.
        dist.barrier()
        if rank == 0:
            from datetime import timedelta
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
            try:
                dist.all_reduce(one)
            except dist.DistBackendError as error:
                assert "waiting on ranks 1, 2, 3" in str(error) and "all_reduce" in str(error), error
                os.write(1, b"LATE\\n")
        else:
            time.sleep(2.0)
        os._exit(0)
        """,
    )
    output = jobs.podring("run", "--slice", "v5e:2x2", str(program), PODRING_ENGINE="ici").output
    assert output.count("FINE") == 4 and output.count("LATE") == 1, output[-6000:]


def test_two_slices(tmp_path: Path) -> None:
    # Programs inside of a slice, the fabric between them, through the real torch_tpu.
    program = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from podring import _core
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("tpu")
        rank = dist.get_rank()
        one = torch.full((1000,), float(rank + 1), device="tpu")
        before = _core.engine_counts()["launched"]
        dist.all_reduce(one)
        assert one.cpu().tolist() == [10.0] * 1000
        # A reduce-scatter and an all-gather.
        assert _core.engine_counts()["launched"] == before + 2
        # Of each slice, and of the first chips of both.
        mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("slice", "chip"))
        for name, total in (("chip", [1, 1, 5, 5]), ("slice", [2, 4, 2, 4])):
            mine = torch.full((7,), float(rank), device="tpu")
            dist.all_reduce(mine, group=mesh.get_group(name))
            assert mine.cpu().tolist() == [float(total[rank])] * 7, (name, mine)

        def model():
            torch.manual_seed(0)
            return torch.nn.Linear(16, 16)

        sharded, whole = model().to("tpu"), model()
        fully_shard(sharded, mesh=mesh)  # Sharded within a slice, copied between them.
        batches = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
        sharded(batches[rank].to("tpu")).pow(2).mean().backward()
        whole(batches).pow(2).mean().backward()
        for got, expected in zip(sharded.parameters(), whole.parameters()):
            torch.testing.assert_close(got.grad.full_tensor().cpu(), expected.grad, rtol=1e-4, atol=1e-5)
        dist.destroy_process_group()
        os.write(1, f"FINE {rank}\\n".encode())
        """,
    )
    done = jobs.podring("run", "--slice", "v5e:1x2*2", str(program), PODRING_ENGINE="ici")
    assert done.code == 0 and done.output.count("FINE") == 4, done.output[-6000:]


def test_a_second_job_finds_its_programs_on_disk(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from podring import _core
        dist.init_process_group("tpu")
        one = torch.full((1000,), float(dist.get_rank() + 1), device="tpu")
        dist.all_reduce(one)
        out = torch.zeros(2000, device="tpu")
        dist.all_gather_into_tensor(out, one)
        assert out.cpu().tolist() == [3.0] * 2000
        counts = _core.engine_counts()
        os.write(1, f"COUNTS {[counts[name] for name in ('compiled', 'received', 'loaded', 'damaged')]}\\n".encode())
        dist.destroy_process_group()
        """,
    )
    cache = tmp_path / "cache"

    def counts() -> tuple[list[int], str]:
        words = ("run", "--slice", "v5e:1x2", str(program))
        done = jobs.podring(*words, PODRING_ENGINE="ici", PODRING_CACHE_DIR=str(cache))
        lines = [line for line in done.output.splitlines() if "COUNTS [" in line]
        assert done.code == 0 and len(lines) == 2, done.output[-4000:]
        rows = [json.loads(line[line.index("COUNTS [") + len("COUNTS ") :]) for line in lines]
        return [sum(column) for column in zip(*rows, strict=True)], done.output

    compiled, received, loaded, damaged = counts()[0]
    assert compiled >= 2 and received + loaded == compiled and damaged == 0
    files = sorted(cache.glob("*.pjrt"))
    assert len(files) == compiled
    # Nothing is compiled, and no rank needs another's.
    assert counts()[0] == [0, 0, 2 * compiled, 0]
    # One is damaged: it alone is compiled again, which is said, and the job goes on.
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    (compiled, received, loaded, damaged), output = counts()
    assert compiled + received + loaded == 2 * len(files) and compiled == 1 and damaged >= 1
    assert f"could not be used and is compiled again: its checksum is wrong file={files[0]}" in output
    assert sorted(cache.glob("*.pjrt")) == files


def test_a_group_that_libtpu_would_refuse_goes_over_the_fabric(tmp_path: Path) -> None:
    # Two chips at the corner of a slice are not sure to be taken, two beside them are. Wrong settings before that.
    program = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from podring import _core
        for name, value in (("PODRING_CACHE_DIR", "/dev/null/programs"), ("PODRING_CACHE_MIB", "much"),
                            ("PODRING_EXACT", "maybe")):
            os.environ[name] = value
            try:
                dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
            except ValueError as error:
                assert str(error).startswith(f'{name}="{value}'), error
                os.write(1, b"RAISED\\n")
            del os.environ[name]
        dist.init_process_group("tpu")
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        one = torch.full((100,), float(rank), device="tpu")
        dist.all_reduce(one, group=pairs[rank // 2])
        assert one.cpu().tolist() == [[1.0], [5.0]][rank // 2] * 100
        counts = _core.engine_counts()
        assert (counts["launched"], counts["refused"]) == [(0, 1), (1, 0)][rank // 2], counts
        dist.destroy_process_group()
        os.write(1, b"FINE\\n")
        """,
    )
    done = jobs.podring("run", "--slice", "v5e:1x4", str(program), PODRING_ENGINE="ici")
    assert done.code == 0 and done.output.count("FINE") == 4 and done.output.count("RAISED") == 12, done.output[-6000:]
    assert done.output.count("a group's collectives go over the hosts' network") == 2, done.output[-6000:]


def test_a_rank_killed_inside_a_program_is_named(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        f"""
        import torch, torch.distributed as dist
        # The launcher ends the survivors as soon as it sees the death, perhaps before they have.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.init_process_group("tpu")
        rank = dist.get_rank()
        one = torch.ones(1 << 20, device="tpu")
        dist.all_reduce(one)
        one.cpu()
        if rank == 2:
            # The others are in the program by then.
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            dist.all_reduce(one)
        except dist.DistBackendError as error:
            assert "all_reduce" in str(error) and "slice v5e:2x2" in str(error), error
            # In one piece: lines of several ranks mix.
            os.write(1, f"LOST {{rank}} {{'lost rank 2' in str(error)}}\\n".encode())
            assert time.monotonic() - begin < 30
        time.sleep(2.0)
        os._exit({signal.SIGUSR1.value})
        """,
    )
    output = jobs.podring("run", "--slice", "v5e:2x2", str(program), PODRING_ENGINE="ici").output
    said = {line[line.index("LOST") :] for line in output.splitlines() if "LOST" in line}
    assert said == {"LOST 0 True", "LOST 1 True", "LOST 3 True"}, output[-6000:]


def test_an_engine_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    text = """
        import torch, torch.distributed as dist
        # Another name; and no virtual slice.
        for engine in ("tpu", "ici", "fabric"):
            os.environ["PODRING_ENGINE"] = engine
            try:
                dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
                print("FORMED", engine, flush=True)
            except ValueError as error:
                print("RAISED", error, flush=True)
    """
    env = jobs.environment(PODRING_SLICE="")
    program = run_program([jobs.python(), script(tmp_path, text)], 90.0, env, cwd=tmp_path)
    assert program.code == 0 and "FORMED fabric" in program.output, program.output[-4000:]
    for expected in (
        'RAISED PODRING_ENGINE="tpu": expected fabric or ici (not set: ici on a TPU, otherwise fabric)',
        'RAISED PODRING_ENGINE="ici": expected a chip that torch_tpu holds',
    ):
        assert expected in program.output, program.output[-4000:]
