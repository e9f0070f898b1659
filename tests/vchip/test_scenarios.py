"""Every scenario on virtual chips, compared with CPU tensors: a job for each number of ranks, a test per scenario."""

from __future__ import annotations

import functools

import pytest

from tests.vchip import jobs

COLLECTIVES = [
    "reductions",
    "movements",
    "wide_and_narrow_types",
    "point_to_point",
    "from_any_source",
    "layouts",
    "aliases_keep_their_values",
    "deferred_values",
    "asynchronous",
    "future_callbacks",
    "coalesced",
    "objects",
    "monitored_barrier",
    "refusals",
    "memory_stays_flat",
    "functional_eager",
    "compiled_collectives",
    "compiled_but_split",
    "let_go_of_beside_programs",
    "twins_end_with_their_groups",
    "device_facts",
]
TRAINING = [
    "eager_training",
    "ddp",
    "ddp_compressed",
    "sync_batch_norm",
    "fsdp2",
    "hsdp",
    "dtensor",
    "tensor_parallel",
    "checkpoint",
    "checkpoint_in_background",
    "pipeline",
    "compiled_training",
]


FEW = [
    "reductions",
    "movements",
    "layouts",
    "aliases_keep_their_values",
    "asynchronous",
    "future_callbacks",
    "refusals",
    "compiled_collectives",
    "let_go_of_beside_programs",
    "twins_end_with_their_groups",
    "device_facts",
    "ddp",
    "ddp_compressed",
    "checkpoint",
    "checkpoint_in_background",
]
OURS = COLLECTIVES + TRAINING if jobs.ALL else FEW


@functools.cache
def job(ranks: int) -> dict[str, jobs.Said]:
    return jobs.run_scenarios(OURS, ranks)


@pytest.mark.parametrize("name", OURS)
def test_two_ranks(name: str) -> None:
    job(2)[name].check(name)


# What runs over torch_tpu's own process group, its collectives inside of XLA programs.
ALL_THEIRS = [
    "their_collectives",
    "their_bitwise",
    "their_uneven_exchange",
    "their_subgroups",
    "their_limits",
    "point_to_point",
    "objects",
    "eager_training",
    "ddp",
    "fsdp2",
    "hsdp",
    "dtensor",
    "tensor_parallel",
    "checkpoint",
    "pipeline",
    "compiled_training",
]
THEIRS = ALL_THEIRS if jobs.ALL else ["their_bitwise", "ddp"]


# Times need a quiet machine.
@jobs.thorough
def test_speed() -> None:
    jobs.run_scenarios(["speed"], 2)["speed"].check("speed")


@functools.cache
def their_job(ranks: int) -> dict[str, jobs.Said]:
    names = THEIRS if ranks == 2 else ALL_THEIRS
    return jobs.run_scenarios(names, ranks, {2: "v5e:1x2", 4: "v5e:2x2"}[ranks], PODRING_DISABLE="1")


@pytest.mark.parametrize("name", THEIRS)
def test_torch_tpus_own_process_group(name: str) -> None:
    their_job(2)[name].check(name)


@jobs.thorough
@pytest.mark.parametrize("name", COLLECTIVES + TRAINING)
def test_four_ranks(name: str) -> None:
    job(4)[name].check(name)


@jobs.thorough
@pytest.mark.parametrize("name", ALL_THEIRS)
def test_torch_tpus_own_process_group_of_four(name: str) -> None:
    their_job(4)[name].check(name)
