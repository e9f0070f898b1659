"""podring.mesh: rank orders and device meshes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from podring import _core, device_mesh, rank_order


def test_importing_podring_does_not_import_torch() -> None:
    code = "import sys, podring; podring.rank_order((4,), slice='v5e:2x2'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_every_rank_once() -> None:
    order = rank_order((8, 16), ("dp", "tp"), slice="v5p:4x4x8")
    assert sorted(order) == list(range(128))


def test_the_environment_names_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_TOPOLOGY", raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    assert len(rank_order((4, 4))) == 16
    monkeypatch.setenv("TPU_TOPOLOGY", "4x8")
    with pytest.raises(ValueError, match="16 chips"):
        rank_order((4, 4))
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    monkeypatch.delenv("TPU_TOPOLOGY")
    with pytest.raises(ValueError, match="which slice"):
        rank_order((4, 4))


def test_traffic_and_talk_choose_who_gets_the_links() -> None:
    def all_reduce(order: list[int]) -> list[float]:
        return [micros for _, _, micros in _core.topology_judge("v5p:4x4x8", None, (16, 8), order)]

    inner = all_reduce(rank_order((16, 8), ("a", "b"), slice="v5p:4x4x8", traffic={"a": 1, "b": 100}))
    outer = all_reduce(rank_order((16, 8), ("a", "b"), slice="v5p:4x4x8", traffic={"a": 100, "b": 1}))
    assert outer[0] <= inner[0]
    assert inner[1] <= outer[1]
    assert sorted(rank_order((16, 8), ("a", "b"), slice="v5p:4x4x8", talk={"b": "all-to-all"})) == list(range(128))


@pytest.mark.parametrize(
    ("shape", "names", "options", "why"),
    [
        ((4, 5), ("dp", "tp"), {}, "dp=4,tp=4"),
        ((0, 16), ("dp", "tp"), {}, "size 0"),
        ((-4, -4), ("dp", "tp"), {}, "size -4"),
        ((4, 4), ("dp", "dp"), {}, "named twice"),
        ((4, 4), ("dp",), {}, "one per mesh axis"),
        ((4, 4), ("dp", "tp"), {"traffic": {"pp": 1.0}}, "no mesh axis"),
        ((4, 4), ("dp", "tp"), {"traffic": {"tp": float("nan")}}, "finite"),
        ((4, 4), ("dp", "tp"), {"talk": {"tp": "shouting"}}, "expected one of"),
        ((4, 4), ("dp", "tp"), {"dcn": {"dp": 2}}, "slices"),
        ((4, 4), ("dp", "tp"), {"slice": "v9:4x4"}, "nearest"),
    ],
)
def test_what_cannot_be(shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, object], why: str) -> None:
    arguments: dict[str, object] = {"slice": "v5e:4x4", **options}
    with pytest.raises(ValueError, match=why):
        rank_order(shape, names, **arguments)  # type: ignore[arg-type]


def test_device_mesh_stands_like_the_order() -> None:
    """One process stands for rank 0 of a fake world: the mesh's coordinates are the order's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    try:
        mesh = device_mesh((4, 4), ("dp", "tp"), slice="v5e:4x4", device_type="cpu")
        order = torch.tensor(rank_order((4, 4), ("dp", "tp"), slice="v5e:4x4")).reshape(4, 4)
        assert torch.equal(mesh.mesh.long(), order)
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh["tp"].size() == 4
        assert list(mesh.get_coordinate() or ()) == [int(part[0]) for part in torch.where(order == 0)]
        with pytest.raises(ValueError, match="16 ranks"):
            device_mesh((8, 4), ("dp", "tp"), slice="v5e:4x8", device_type="cpu")
    finally:
        dist.destroy_process_group()


def test_the_command_prints_the_same_mesh() -> None:
    arguments = ["podring", "topo", "v5e:4x4*2", "--mesh", "dp=2,tp=16", "--json"]
    code = f"import sys; from podring import _core; sys.exit(_core.cli_main({arguments!r}, sys.executable))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True, text=True)
    answer = json.loads(done.stdout)
    ids = [row[0] for row in _core.topology_devices("v5e:4x4*2")]
    assert [device["id"] for device in answer["devices"]] == ids
    order = rank_order((2, 16), ("dp", "tp"), slice="v5e:4x4*2")
    assert [number for row in answer["mesh"] for number in row] == [ids[rank] for rank in order]
    assert [(axis["name"], axis["size"]) for axis in answer["axes"]] == [("dp", 2), ("tp", 16)]
    assert all(set(axis["us"]) == {"allgather", "reduce-scatter", "allreduce", "all-to-all"} for axis in answer["axes"])
