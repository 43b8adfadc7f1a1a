"""Runs with virtual-optimizer against runs without it: every bit, and the bytes on the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import RankCost
from tests.core.train.runs import Runs
from tests.support.costs import planned
from tests.support.state_jobs import Steps, anonymous_bytes, stepwise, without_room
from tests.support.state_runs import (
    BF16,
    DISTRIBUTED,
    EP,
    FP32,
    OVERLAPPED,
    SKIPPED,
    STEPS,
    TP,
    assert_equal,
    compared_checkpoints,
    fingerprints,
    without_and_with,
)
from tests.support.stepping_jobs import reloaded

from .virtual_jobs import before_a_step, first_step, with_few_operators

NAME: Final = ("virtual-optimizer",)
FOLDER: Final = "plugins.virtual-optimizer.folder"
SIZE: Final = "plugins.virtual-optimizer.size"
PP: Final = {"parallel.pipeline_model_parallel_size": 2, "model.num_layers": 4}
MOMENTS: Final = 8
"""Bytes of an element's states."""


def both(
    pool: GlooPool, folder: Path, values: Mapping[str, Any], ranks: int, *job: Any, beside: Any = ()
) -> tuple[list[Steps], list[Steps]]:
    """Without and with the plugin."""
    plain = {key: value for key, value in values.items() if key != SIZE}
    own = (NAME, {**values, FOLDER: str(folder)})
    return without_and_with(pool, stepwise, ranks, plain, own, *job, beside=beside)


def costs_of(values: Mapping[str, Any], ranks: int = 1) -> tuple[RankCost, ...]:
    _, costs = planned(values, NAME, ranks)
    return costs


@pytest.mark.exhaustive(by=lambda ranks: [ranks] if ranks == 2 else [])
@pytest.mark.parametrize(
    ("values", "ranks", "skipped"),
    [
        pytest.param({**DENSE, **FP32, "train.global_batch_size": 2}, 1, (), id="fp32"),
        pytest.param({**DENSE, **BF16, **DISTRIBUTED}, 2, SKIPPED, id="bf16 dp2 distributed"),
    ],
)
def test_20_steps_keep_every_bit_and_no_state_on_the_device(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int, skipped: Any
) -> None:
    """Skipped steps included. ``plan`` counts the bytes, and the update takes no more."""
    gloo_pool.run(stepwise, ranks, values, (), 2, (), 2)  # leaves what processes keep
    plain, ours = both(gloo_pool, tmp_path, values, ranks, STEPS, skipped, 4)
    (cost,) = costs_of({**values, FOLDER: str(tmp_path)}, ranks)
    for want, got in zip(plain, ours, strict=True):
        assert (got.readings, got.digests) == (want.readings, want.digests)
        assert len({*want.digests}) == STEPS // 4
        assert [n for n, (*_, is_skipped) in enumerate(want.readings, 1) if is_skipped] == [
            *skipped
        ]
        assert want.file_bytes == 0
        assert want.live_bytes - got.live_bytes == got.file_bytes
        assert want.state_bytes - got.state_bytes == got.file_bytes
        assert got.most_bytes == want.most_bytes
    in_files = sum(one.file_bytes for one in ours)
    assert in_files == MOMENTS * cost.trained_parameters
    assert in_files / ranks == cost.memory.off_device


def test_each_pipeline_stage_has_its_size(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """What does not fit stays on the device."""
    size = 50_000
    values = {**DENSE, **BF16, **PP, SIZE: [size / 2**30, 0.0]}
    plain, ours = both(gloo_pool, tmp_path, values, 2, 5)
    costs = costs_of({**values, FOLDER: str(tmp_path)}, 2)
    for want, got, cost in zip(plain, ours, costs, strict=True):
        assert (got.readings, got.digests) == (want.readings, want.digests)
        assert want.state_bytes - got.state_bytes == got.file_bytes == cost.memory.off_device
    first, last = ours
    assert 0.9 * size < first.file_bytes <= size < MOMENTS * costs[0].trained_parameters
    assert last.file_bytes == 0


def test_the_first_step_creates_states_one_by_one(gloo_pool: GlooPool) -> None:
    """On the device there are never those of two parameters."""
    values = {**DENSE, **BF16}
    ((most, steps),) = gloo_pool.run(first_step, 1, values, NAME)
    (cost,) = costs_of(values)
    numels = [p.numel for p in cost.rank.parameters]
    assert steps == len(numels)
    assert most == MOMENTS * max(numels)


def test_states_that_are_loaded_leave_the_device_before_a_step(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    values = {**DENSE, **BF16}
    (plain,) = gloo_pool.run(before_a_step, 1, values, ())
    (ours,) = gloo_pool.run(before_a_step, 1, {**values, FOLDER: str(tmp_path)}, NAME)
    (cost,) = costs_of(values)
    assert (plain, ours) == (MOMENTS * cost.trained_parameters, 0)


@pytest.mark.exhaustive(by=lambda ranks: [ranks] if ranks == 4 else [])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16, **OVERLAPPED}, 2, id="overlapped"),
        pytest.param({**DENSE, **BF16, "train.precision": "fp16"}, 1, id="fp16"),
        pytest.param({**MOE, **BF16, **TP, **EP, **DISTRIBUTED}, 4, id="moe tp2 ep2 dp2"),
    ],
)
def test_steps_of_other_layouts_keep_every_bit(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    values = {**values, "train.global_batch_size": 8}
    plain, ours = both(gloo_pool, tmp_path, values, ranks, 5)
    for want, got in zip(plain, ours, strict=True):
        assert (got.readings, got.digests) == (want.readings, want.digests)
        assert want.state_bytes - got.state_bytes == got.file_bytes > 0


@pytest.mark.exhaustive(
    by=lambda beside: [beside] if beside in ("muon", "reuse-fp32-param") else []
)
@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(name, marks=pytest.mark.needs_plugins(name))
        for name in (
            "muon",
            "ema-adamw",
            "o2-bf16-optimizer",
            "low-precision-optimizer",
            "reuse-fp32-param",
        )
    ],
)
def test_steps_beside_another_optimizer_keep_every_bit(
    gloo_pool: GlooPool, tmp_path: Path, beside: str
) -> None:
    """Other states, states that a checkpoint replaces by others, and master weights in halves."""
    values = {**DENSE, **BF16}
    (want,), (got,) = both(gloo_pool, tmp_path, values, 1, 5, beside=(beside,))
    assert (got.readings, got.digests) == (want.readings, want.digests)
    assert want.state_bytes - got.state_bytes == got.file_bytes > 0


@pytest.mark.exhaustive(by=lambda begun, resumed: [resumed[0]] if begun[0] == resumed[0] else [])
@pytest.mark.parametrize(
    ("begun", "resumed", "precision"),
    [
        pytest.param((NAME, DISTRIBUTED, 2), (NAME, {}, 1), "bf16", id="dp2 to one rank"),
        pytest.param(((), {}, 1), (NAME, DISTRIBUTED, 2), "fp32", id="without to dp2 with fp32"),
        pytest.param(((), {}, 1), (NAME, DISTRIBUTED, 2), "bf16", id="without to dp2 with"),
        pytest.param((NAME, DISTRIBUTED, 2), ((), {}, 1), "bf16", id="dp2 with to without"),
    ],
)
def test_checkpoints_are_those_of_a_run_without_it(
    gloo_pool: GlooPool, tmp_path: Path, begun: Any, resumed: Any, precision: str
) -> None:
    """Saved, loaded into another number of ranks, and after more steps, all bitwise; also where
    states must be copied to be read."""
    values = {**DENSE, **BF16, "train.precision": precision}
    plain, plain_after = compared_checkpoints(
        gloo_pool, tmp_path, values, begun, resumed, around=with_few_operators
    )
    moments = [key for key in plain if key.startswith("optimizer/exp_avg/")]
    assert any(not torch.equal(plain[key], plain_after[key]) for key in moments)


def test_weights_that_are_loaded_are_followed(gloo_pool: GlooPool) -> None:
    values = {**DENSE, **BF16}
    plain, ours = (gloo_pool.run(reloaded, 1, values, names) for names in ((), NAME))
    for at in range(2):
        want, got = (full_tensors([rank[at] for rank in one]) for one in (plain, ours))
        assert_equal(got.tensors, want.tensors)


def test_a_stopped_run_resumes_bitwise(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Into files, with fingerprints of a run without it."""
    (tmp_path / "states").mkdir()
    values = {**DENSE, **BF16, **OVERLAPPED, FOLDER: str(tmp_path / "states")}
    runs = Runs(gloo_pool, tmp_path, (values, 2, NAME))
    runs.assert_the_same_in_two_halves()
    runs.plugins = ()
    runs.values = {k: v for k, v in runs.values.items() if not k.startswith("plugins.")}
    runs("plain")
    ours, plain = (fingerprints(tmp_path / name) for name in ("straight", "plain"))
    assert ours == plain
    assert len({*plain}) > len(plain) / 2


def test_the_memory_of_the_process_has_no_states(tmp_path: Path) -> None:
    """By the system's count of what is no page of a file: 8 bytes for each parameter."""

    def added(values: Mapping[str, Any], enable: tuple[str, ...]) -> int:
        with GlooPool() as pool:  # memory that an earlier job has freed would be taken again
            (found,) = pool.run(anonymous_bytes, 1, values, enable)
        return int(found)

    values = {**DENSE, **BF16, "model.hidden_size": 256, "model.ffn_hidden_size": 4096}
    (cost,) = costs_of(values)
    plain, ours = added(values, ()), added({**values, FOLDER: str(tmp_path)}, NAME)
    assert cost.trained_parameters > 4_000_000
    assert plain - ours == pytest.approx(MOMENTS * cost.trained_parameters, rel=0.05)


def test_a_full_disk_is_an_error_of_the_user(gloo_pool: GlooPool, tmp_path: Path) -> None:
    (error,) = gloo_pool.run(without_room, 1, {**DENSE, **BF16, FOLDER: str(tmp_path)}, NAME)
    assert f"virtual-optimizer: {FOLDER}={tmp_path}: no file of" in error
    assert "bytes: No space left on device; name a folder on a disk with room for all" in error
