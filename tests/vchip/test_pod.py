"""`podring run` and the hook on TPU hosts, as far as a host without a TPU shows it: what the ranks find in their
environment, and what the hook makes of a torch_tpu that says it has a chip. Nothing here starts PJRT.
"""

from __future__ import annotations

import json
import textwrap
import threading
from pathlib import Path

import pytest

from tests.harness import free_port
from tests.processes import Program, run_program
from tests.vchip import jobs

# Each rank writes its environment down. No torch: it would look for the chips.
TELL = """
    import json, os, pathlib
    here = pathlib.Path(os.environ["TELL"], os.environ["RANK"] + ".json")
    here.write_text(json.dumps(dict(os.environ)))
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


def told(folder: Path) -> dict[int, dict[str, str]]:
    return {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("name", "devices", "shape"),
    [("v5e:2x2", 4, "2,2,1"), pytest.param("tpu7x:1x1x1", 2, "1,1,1,2", marks=jobs.thorough)],
)
def test_one_host_has_a_rank_for_each_device(tmp_path: Path, name: str, devices: int, shape: str) -> None:
    words = ["run", "--slice", name, str(script(tmp_path, TELL))]
    env = {"PODRING_TPU_DEVICES": str(devices), "TELL": str(tmp_path), "TPU_WORKER_HOSTNAMES": "localhost"}
    program = jobs.podring(*words, **env)
    assert program.code == 0, program.output[-4000:]
    ranks = told(tmp_path)
    assert sorted(ranks) == list(range(devices)), program.output[-4000:]
    lists = {rank["TORCH_TPU_SLICEBUILDER_ADDRESSES"] for rank in ranks.values()}
    assert len(lists) == 1
    addresses = lists.pop().split(",")
    assert len(set(addresses)) == devices and all(one.startswith("localhost:") for one in addresses), addresses
    for number, rank in ranks.items():
        assert (rank["LOCAL_RANK"], rank["WORLD_SIZE"]) == (str(number), str(devices))
        assert rank["TORCH_TPU_TOPOLOGY"] == shape and rank["PODRING_SLICE"] == name
        # podring's table, over libtpu: for whoever imports torch_tpu first.
        assert Path(rank["TPU_LIBRARY_PATH"]).name.startswith("_core") and "libtpu" in rank["PODRING_LIBTPU"]
        assert "PODRING_PJRT_PLUGIN" not in rank


# Hosts, ranks of each, and the slice that they make up.
@pytest.mark.parametrize(
    ("hosts", "each", "name", "shape"),
    [(2, 2, "v5e:2x2", "2,2,1"), pytest.param(4, 4, "v5e:4x4", "4,4,1", marks=jobs.thorough)],
)
def test_hosts_of_a_pod_keep_their_places(tmp_path: Path, hosts: int, each: int, name: str, shape: str) -> None:
    program = script(tmp_path, TELL)
    names = [f"127.0.0.{1 + host}" for host in range(hosts)]
    port = free_port()
    ended: dict[int, Program] = {}

    def host(number: int) -> None:
        env = {
            "PODRING_TPU_DEVICES": str(each),
            "PODRING_INSECURE": "1",
            "TPU_WORKER_HOSTNAMES": ",".join(names),
            "TELL": str(tmp_path),
        }
        words = ["run", "--slice", name, "--rdzv-endpoint", f"127.0.0.1:{port}"]
        if number % 2:
            words += ["--nnodes", str(hosts), "--node-rank", str(number)]
        else:
            env["TPU_WORKER_ID"] = str(number)
        ended[number] = jobs.podring(*words, str(program), **env)

    # The last comes first.
    threads = [threading.Thread(target=host, args=(number,)) for number in reversed(range(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in ended.items():
        assert one.code == 0, f"host {number}: {one.output[-4000:]}"
    ranks = told(tmp_path)
    assert sorted(ranks) == list(range(hosts * each))
    addresses = ",".join(f"{one}:{8070 + local}" for one in names for local in range(each))
    for number, rank in ranks.items():
        place = (rank["GROUP_RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"])
        assert place == (str(number // each), str(number % each), str(hosts * each)), number
        # Rank r's address is on the host that it runs on.
        assert rank.get("TPU_WORKER_ID", rank["GROUP_RANK"]) == rank["GROUP_RANK"]
        assert (rank["TORCH_TPU_SLICEBUILDER_ADDRESSES"], rank["TORCH_TPU_TOPOLOGY"]) == (addresses, shape)


def test_devices_are_counted_where_a_driver_has_a_file_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podring import _early

    monkeypatch.delenv("PODRING_TPU_DEVICES", raising=False)

    def device(name: str, vendor: str, group: str = "") -> None:
        place = tmp_path / "sys/bus/pci/devices" / name
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        if group:
            (place / "iommu_group").symlink_to(f"../../kernel/iommu_groups/{group}")

    assert _early.tpu_devices(tmp_path) == 0
    device("0000:00:01.0", "0x8086", "1")
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/1").touch()
    assert _early.tpu_devices(tmp_path) == 0
    # Two of Google's, with files of the older driver; then with VFIO's, of which one isn't handed to this container.
    device("0000:00:04.0", "0x1ae0", "4")
    device("0000:00:05.0", "0x1ae0", "5")
    assert _early.tpu_devices(tmp_path) == 0
    for number in (0, 1):
        (tmp_path / f"dev/accel{number}").touch()
    assert _early.tpu_devices(tmp_path) == 2
    (tmp_path / "dev/vfio/5").touch()
    assert _early.tpu_devices(tmp_path) == 1
    monkeypatch.setenv("PODRING_TPU_DEVICES", "8")
    assert _early.tpu_devices(tmp_path) == 8
    monkeypatch.setenv("PODRING_TPU_DEVICES", "-1")
    with pytest.raises(ValueError, match="PODRING_TPU_DEVICES=-1: expected how many"):
        _early.tpu_devices(tmp_path)


@pytest.mark.parametrize(
    ("env", "words", "expected"),
    [
        (
            {"PODRING_TPU_DEVICES": "4"},
            ["--slice", "v5e:4x4"],
            "4 ranks (4 on each host, hosts: 1), and v5e:4x4 has 16",
        ),
        ({"PODRING_TPU_DEVICES": "4"}, ["--slice", "v5e:2x2", "--hosts", "2"], "--hosts plays hosts"),
        ({"PODRING_TPU_DEVICES": "four"}, ["--slice", "v5e:2x2"], "PODRING_TPU_DEVICES=four"),
        ({"PODRING_TPU_DEVICES": "0"}, ["--slice", "v5e:2x2", "--nnodes", "2"], "give --node-rank and --rdzv-endpoint"),
    ],
)
def test_what_a_host_cannot_start_is_refused(env: dict[str, str], words: list[str], expected: str) -> None:
    program = jobs.podring("run", *words, "x.py", **env)
    assert program.code == 1 and expected in program.output, program.output


# A torch_tpu that says it has a chip. libtpu's place is taken by XLA's CPU plugin, which podring forwards untouched.
CHIP = """
    import os, warnings
    import torch_tpu  # before the hook has run
    from torch_tpu._internal.utils import hardware
    hardware.get_tpu_device_count = lambda: 1
    hardware.get_tpu_topology = lambda count=None: {1: "1,1,1", 4: "2,2,1"}[count]
    from podring import _core, _hook
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _hook._done.clear(), _hook._kept.clear()
        _hook.load()
    _hook.raise_kept()
    import torch
    import torch.distributed as dist
    warned = [str(one.message) for one in told if "podring" in str(one.message)]
    assert torch._C._get_privateuse1_backend_name() == "tpu" and not _hook.on_virtual_slice()
    # What torch_tpu lacks is there, and what only a virtual slice needs isn't.
    torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
    assert torch.tpu.memory_stats is not None and torch.tpu.empty_cache is not None
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_stats", "PrivateUse1")
    assert hardware.get_tpu_device_name() == "TPU", hardware.get_tpu_device_name()
    assert "TORCH_TPU_TIER2_COMPILATION_CACHE" not in os.environ
    assert dist.Backend.default_device_backend_map["tpu"] == "tpu"
"""
RANK = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def chip(folder: Path, text: str, raises: bool = False, **env: str) -> None:
    start = CHIP.replace("    _hook.raise_kept()\n", "") if raises else CHIP
    path = script(folder, start + text + '\n    print("FINE")\n')
    words = [jobs.python(), path]
    program = run_program(words, 90.0, jobs.environment(PODRING_TPU_DEVICES="4", **RANK, **env), cwd=folder)
    assert program.code == 0 and "FINE" in program.output, program.output[-4000:]


def cpu_plugin() -> str:
    ask = "from podring import _early; print(_early.cpu_plugin())"
    return run_program([jobs.python(), "-c", ask], 60.0, jobs.environment()).output.split()[-1]


def test_on_a_tpu_the_client_is_shared_and_programs_run_collectives(tmp_path: Path) -> None:
    chip(
        tmp_path,
        """
    assert _core.interposed() == (True, None) and warned == [], (warned, _core.interposed())
    assert _core.engine() == "ici", _core.engine()
    assert os.environ["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    wanted = [f"localhost:{8070 + rank}" for rank in range(4)]
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",") == wanted
    os.environ["PODRING_ENGINE"] = "fabric"
    assert _core.engine() == "fabric"
        """,
        PODRING_SLICE="v5e:2x2",
        PODRING_LIBTPU=cpu_plugin(),
    )


@jobs.thorough
def test_a_client_that_cannot_be_shared_is_said_once(tmp_path: Path) -> None:
    # Without PODRING_SLICE nothing of podring's runs before torch_tpu is imported.
    chip(
        tmp_path,
        """
    assert not _core.interposed()[0] and len(warned) == 1, (warned, _core.interposed())
    assert "torch_tpu came before podring could wrap libtpu" in warned[0] and "podring run" in warned[0], warned
    assert _core.engine() == "fabric", _core.engine()
    assert os.environ["TORCH_TPU_TOPOLOGY"] == "2,2,1"
        """,
        PODRING_SLICE="",
        TPU_LIBRARY_PATH=cpu_plugin(),
    )


@jobs.thorough
def test_what_is_wrong_on_a_tpu_is_raised_late(tmp_path: Path) -> None:
    chip(
        tmp_path,
        """
    try:
        dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        assert "4 ranks (4 on each host, hosts: 1), and v5e:4x4 has 16" in str(error), error
    else:
        raise AssertionError("formed")
        """,
        raises=True,
        PODRING_SLICE="v5e:4x4",
        PODRING_LIBTPU=cpu_plugin(),
    )


@jobs.thorough
def test_torch_tpus_own_function_says_the_same(tmp_path: Path) -> None:
    text = """
        import os, sys
        import torch_tpu
        from torch_tpu._internal.utils import hardware
        from torch_tpu._internal.distributed import distributed
        hardware.get_tpu_device_count = lambda: 4
        hardware.get_tpu_topology = lambda count=None: None
        distributed._query_local_device_coords = lambda: [0, 2, 0]
        names = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
        from podring import _core
        ours = _core.tpu_environment()
        assert sorted(ours) == sorted(names), ours
        os.environ["TORCH_TPU_TOPOLOGY"] = ours["TORCH_TPU_TOPOLOGY"]
        distributed.set_tpu_launch_env(nnodes=4, nproc_per_node=4)
        assert {name: os.environ[name] for name in names} == ours
        # And of this host's number, by the place of its chips.
        assert os.environ["NODE_RANK"] == "2", os.environ["NODE_RANK"]
        print("FINE")
    """
    env = {
        "RANK": "8",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3",
        "TPU_WORKER_ID": "2",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_TOPOLOGY": "4x4",
    }
    program = run_program([jobs.python(), script(tmp_path, text)], 90.0, jobs.environment(**env), cwd=tmp_path)
    assert program.code == 0 and "FINE" in program.output, program.output[-4000:]
