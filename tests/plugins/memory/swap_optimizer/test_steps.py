"""Runs with swap-optimizer against the run without it: every bit, and the bytes on the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.ops.optimizer_buckets import buckets
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import RankCost
from tests.core.train.runs import Runs
from tests.support.costs import planned
from tests.support.file_traffic import file_traffic
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

from .swap_jobs import late, resident_file_bytes

NAME: Final = ("swap-optimizer",)
BUCKET: Final = 3000
"""Elements: several buckets, one of which is a single larger parameter."""
OPTIONS: Final = {"plugins.swap-optimizer.bucket_size": BUCKET}
FOLDER: Final = "plugins.swap-optimizer.folder"


def both(
    pool: GlooPool, folder: Path, values: Mapping[str, Any], ranks: int, *job: Any, beside: Any = ()
) -> tuple[list[Steps], list[Steps]]:
    """Without and with the plugin."""
    own = (NAME, {**OPTIONS, FOLDER: str(folder)})
    return without_and_with(pool, stepwise, ranks, values, own, *job, beside=beside)


@pytest.mark.exhaustive(by=lambda values: ())
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
    """Skipped steps included. ``plan`` counts the bytes."""
    gloo_pool.run(stepwise, ranks, values, (), STEPS, skipped, 4)  # leaves what processes keep
    plain, ours = both(gloo_pool, tmp_path, values, ranks, STEPS, skipped, 4)
    cost = cost_of({**values, **OPTIONS, FOLDER: str(tmp_path)}, NAME, ranks)
    numels = [p.numel for p in cost.rank.parameters]
    item = 12 if values["train.precision"] == "bf16" else 8
    blank = 4  # a NaN stands for all master weights
    for want, got in zip(plain, ours, strict=True):
        assert (got.readings, got.digests) == (want.readings, want.digests)
        assert len({*want.digests}) == STEPS // 4
        assert [n for n, (*_, is_skipped) in enumerate(want.readings, 1) if is_skipped] == [
            *skipped
        ]
        assert want.file_bytes == 0
        assert got.state_bytes <= 4 * len(numels) + blank
        assert want.live_bytes - got.live_bytes == got.file_bytes - blank
        largest = max(max(sum(numels[at] for at in one) for one in buckets(numels, BUCKET)), BUCKET)
        assert item * BUCKET < got.most_bytes <= item * largest
    in_files = sum(one.file_bytes for one in ours)
    assert in_files == item * sum(numels)
    assert in_files / ranks == cost.memory.off_device
    most = max(one.most_bytes for one in ours)
    assert abs(most - item * cost.changes[NAME[0]].optimizer_elements) <= 0.05 * most


@pytest.mark.parametrize(
    ("in_files", "elements"),
    [pytest.param(True, 3072, id="files"), pytest.param(False, 3072 + 1536 + 3072, id="memory")],
)
def test_plan_counts_the_buckets_of_the_update(
    gloo_pool: GlooPool, tmp_path: Path, in_files: bool, elements: int
) -> None:
    """One parameter each, and no norm is between two matrices; they are most of the peak. Copies to
    files are complete at once, so no bucket waits for them in memory."""
    options: dict[str, Any] = {"plugins.swap-optimizer.bucket_size": 1}
    options |= {FOLDER: str(tmp_path)} if in_files else {}
    values = {**DENSE, **BF16, **options, "data.seq_length": 2, "train.micro_batch_size": 1}
    gloo_pool.run(stepwise, 1, values, NAME, 1)  # leaves what processes keep
    (got,) = gloo_pool.run(stepwise, 1, values, NAME, 1)
    cost = cost_of(values, NAME, 1)
    assert cost.memory.moment == "update"
    on_host = 0 if in_files else cost.memory.off_device
    assert got.most_bytes == round(cost.memory.activations - on_host) == 12 * elements


@pytest.mark.parametrize(("precision", "item"), [("fp32", 8), ("bf16", 12)], ids=["fp32", "bf16"])
def test_a_step_writes_and_reads_the_bytes_of_the_plan(
    gloo_pool: GlooPool, tmp_path: Path, precision: str, item: int
) -> None:
    values = {**DENSE, **OPTIONS, FOLDER: str(tmp_path), "train.precision": precision}
    (found,) = gloo_pool.run(file_traffic, 1, values, NAME, 2)
    cost = cost_of(values, NAME, 1)
    assert found.written == found.read == cost.memory.in_files == item * cost.parameters


@pytest.mark.exhaustive(by=lambda values: {*values} & {*OVERLAPPED})
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


@pytest.mark.exhaustive(by=lambda optimizer: ())
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=pytest.mark.needs_plugins(name))
        for name in ("muon", "ema-adamw", "o2-bf16-optimizer", "low-precision-optimizer")
    ],
)
def test_steps_of_another_optimizer_keep_every_bit(
    gloo_pool: GlooPool, tmp_path: Path, optimizer: str
) -> None:
    """Other states of whole matrices, an average that starts as the weights, states that are
    rounded at random, and states that a checkpoint holds in another form."""
    values = {**DENSE, **BF16}
    (want,), (got,) = both(gloo_pool, tmp_path, values, 1, 5, beside=(optimizer,))
    assert (got.readings, got.digests) == (want.readings, want.digests)
    assert got.file_bytes > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_reads_or_frees_before_its_copy_is_complete(
    gloo_pool: GlooPool, precision: str
) -> None:
    values = {**DENSE, **FP32, "train.precision": precision}
    (plain,) = gloo_pool.run(stepwise, 1, values, (), 3)
    (digests,) = gloo_pool.run(late, 1, {**values, **OPTIONS}, NAME, 3)
    assert digests == plain.digests


@pytest.mark.parametrize(
    ("more", "ranks"),
    [pytest.param({}, 1, id="one rank"), pytest.param(DISTRIBUTED, 2, id="distributed")],
)
def test_master_weights_follow_weights_that_are_loaded(
    gloo_pool: GlooPool, more: Mapping[str, Any], ranks: int
) -> None:
    values = {**DENSE, **BF16, **more}
    plain = gloo_pool.run(reloaded, ranks, values, ())
    ours = gloo_pool.run(reloaded, ranks, {**values, **OPTIONS}, NAME)
    for at in range(2):
        want, got = (full_tensors([rank[at] for rank in one]) for one in (plain, ours))
        assert got.problems() == want.problems() == []
        assert_equal(got.tensors, want.tensors)


@pytest.mark.exhaustive(by=lambda begun, resumed: enumerate([bool(begun[0]), bool(resumed[0])]))
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
    """Saved, loaded into another number of ranks, and after more steps, all bitwise."""
    values = {**DENSE, **BF16, **OPTIONS, FOLDER: str(tmp_path), "train.precision": precision}
    plain, plain_after = compared_checkpoints(gloo_pool, tmp_path, values, begun, resumed)
    moments = [key for key in plain if key.startswith("optimizer/exp_avg/")]
    assert any(not torch.equal(plain[key], plain_after[key]) for key in moments)


@pytest.mark.exhaustive(by=lambda more: more)
@pytest.mark.parametrize(
    ("more", "ranks"),
    [pytest.param({}, 1, id="one rank"), pytest.param(OVERLAPPED, 2, id="overlapped")],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, more: Mapping[str, Any], ranks: int
) -> None:
    """Fingerprints, which read master weights in each step, are those of a run without it."""
    values = {**DENSE, **BF16, **OPTIONS, **more}
    runs = Runs(gloo_pool, tmp_path, (values, ranks, NAME))
    runs.assert_the_same_in_two_halves()
    runs.plugins = ()
    runs.values = {k: v for k, v in runs.values.items() if not k.startswith("plugins.")}
    runs("plain")
    ours, plain = (fingerprints(tmp_path / name) for name in ("straight", "plain"))
    assert ours == plain
    assert len({*plain}) > len(plain) / 2


@pytest.mark.needs_plugins("ema-adamw")
def test_averages_are_exchanged_with_master_weights(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Evaluations with averages, and all else, are those of a run without it."""
    values = {
        **DENSE,
        **BF16,
        **DISTRIBUTED,
        "plugins.ema-adamw.decay": 0.7,
        "plugins.ema-adamw.evaluate": True,
        "train.eval_interval": 2,
    }
    runs = Runs(gloo_pool, tmp_path, (values, 2, ("ema-adamw",)))
    plain = runs("plain")
    runs.plugins, runs.values = ("ema-adamw", *NAME), {**values, **OPTIONS}
    ours = runs("ours")
    for one, other in zip(ours, plain, strict=True):
        assert one.readings == other.readings
        assert_equal(one.tensors, other.tensors)
    assert any("eval_loss" in line for line in plain[0].readings)


def test_the_memory_of_the_process_has_no_states(tmp_path: Path) -> None:
    """By the system's count of what is no page of a file: 12 bytes for each parameter."""

    def added(values: Mapping[str, Any], enable: tuple[str, ...]) -> int:
        with GlooPool() as pool:  # memory that an earlier job has freed would be taken again
            (found,) = pool.run(anonymous_bytes, 1, values, enable)
        return int(found)

    values = {**DENSE, **BF16, "model.hidden_size": 256, "model.ffn_hidden_size": 4096}
    numel = cost_of(values, (), 1).trained_parameters
    options = {"plugins.swap-optimizer.bucket_size": 100_000, FOLDER: str(tmp_path)}
    plain, ours = added(values, ()), added({**values, **options}, NAME)
    assert numel > 4_000_000
    assert plain - ours == pytest.approx(12 * numel, rel=0.05)


def test_pages_of_the_files_leave_memory(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """When a model is built, when its weights are loaded, and after a step."""
    values = {**DENSE, **BF16, **OPTIONS, FOLDER: str(tmp_path)}
    (found,) = gloo_pool.run(resident_file_bytes, 1, values, NAME, str(tmp_path))
    assert found == [0, 0, 0]


def test_a_full_disk_is_an_error_of_the_user(gloo_pool: GlooPool, tmp_path: Path) -> None:
    (error,) = gloo_pool.run(without_room, 1, {**DENSE, **BF16, FOLDER: str(tmp_path)}, NAME)
    assert f"swap-optimizer: {FOLDER}={tmp_path}: no file of" in error
    assert "bytes: No space left on device; name a folder on a disk with room for all" in error


def cost_of(values: Mapping[str, Any], enable: tuple[str, ...], ranks: int) -> RankCost:
    _, (cost,) = planned(values, enable, ranks)
    return cost
