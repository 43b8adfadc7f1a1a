"""Runs with reuse-fp32-param against the run without it: every bit, and the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.plugins.memory.reuse_fp32_param.cost import ASIDE
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from tests.core.train.runs import Runs
from tests.support.costs import planned
from tests.support.state_runs import (
    BF16,
    DISTRIBUTED,
    EP,
    OVERLAPPED,
    TP,
    assert_equal,
    compared_checkpoints,
    fingerprints,
    without_and_with,
)
from tests.support.stepping_jobs import reloaded

from .reuse_jobs import Steps, resting_ties, stepwise

NAME: Final = ("reuse-fp32-param",)
BUCKET: Final = {"plugins.reuse-fp32-param.bucket_size": 3000}
"""Several buckets, one of which is a single larger parameter."""
SKIPPED: Final = (1, 2, 60, 131)


def both(
    pool: GlooPool,
    values: Mapping[str, Any],
    ranks: int,
    steps: int,
    skipped: Any,
    every: int,
    *beside: str,
) -> tuple[list[Steps], list[Steps]]:
    """Without and with the plugin."""
    job = (steps, skipped, every)
    return without_and_with(pool, stepwise, ranks, values, (NAME, BUCKET), *job, beside=beside)


# 200 steps take ten seconds: make test has fewer, of which a rank has a part of the states.
@pytest.mark.exhaustive(by=lambda values, steps: {*values} & {*DISTRIBUTED} if steps < 200 else [])
@pytest.mark.parametrize("steps", [75, 200])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16, "train.global_batch_size": 2}, 1, id="one rank"),
        pytest.param({**DENSE, **BF16}, 2, id="dp2"),
        pytest.param({**DENSE, **BF16, **DISTRIBUTED}, 2, id="dp2 distributed"),
    ],
)
def test_many_steps_keep_every_bit(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int, steps: int
) -> None:
    """Skipped steps included; ties occur that are kept aside."""
    expected = [step for step in SKIPPED if step <= steps]
    plain, ours = both(gloo_pool, values, ranks, steps, SKIPPED, 25)
    for want, got in zip(plain, ours, strict=True):
        assert got.readings == want.readings
        assert got.digests == want.digests
        assert len({*want.digests}) == steps // 25
        skipped = [step for step, (*_, is_skipped) in enumerate(want.readings, 1) if is_skipped]
        assert skipped == expected
    assert sum(one.num_aside for one in ours) > 0


@pytest.mark.exhaustive(by=lambda values: {*values} & {*OVERLAPPED})
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16, **OVERLAPPED}, 2, id="overlapped"),
        pytest.param({**MOE, **BF16, **TP, **EP, **DISTRIBUTED}, 4, id="moe tp2 ep2 dp2"),
    ],
)
def test_steps_of_other_layouts_keep_every_bit(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int
) -> None:
    values = {**values, "train.global_batch_size": 8}
    plain, ours = both(gloo_pool, values, ranks, 5, (), 1)
    for want, got in zip(plain, ours, strict=True):
        assert (got.readings, got.digests) == (want.readings, want.digests)


@pytest.mark.exhaustive(by=lambda optimizer: ())
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=pytest.mark.needs_plugins(name))
        for name in ("low-precision-optimizer", "muon", "o2-bf16-optimizer")
    ],
)
def test_steps_of_another_optimizer_keep_every_bit(gloo_pool: GlooPool, optimizer: str) -> None:
    """Whole matrices that have other states than the rest; states that are rounded at random, or
    block by block."""
    (want,), (got,) = both(gloo_pool, {**DENSE, **BF16}, 1, 5, (), 1, optimizer)
    assert (got.readings, got.digests) == (want.readings, want.digests)


@pytest.mark.parametrize("ddp", [{}, DISTRIBUTED], ids=["replicated", "distributed"])
def test_it_saves_two_bytes_per_parameter(gloo_pool: GlooPool, ddp: Mapping[str, Any]) -> None:
    """Divided by the data-parallel ranks with the distributed optimizer. ``plan`` counts them."""
    ranks = 2
    values = {**DENSE, **BF16, **ddp}
    plain, ours = both(gloo_pool, values, ranks, 3, (), 10)
    runs = [(values, ()), ({**values, **BUCKET}, NAME)]
    costs = [planned(given, enable, ranks)[1][0] for given, enable in runs]
    numel = costs[0].trained_parameters
    blanks = 4 * len(costs[0].rank.parameters)  # a NaN stands for a master weight between steps
    fewer = sum(a.state_bytes - b.state_bytes for a, b in zip(plain, ours, strict=True))
    aside = sum(12 * one.num_aside for one in ours)
    copies = 1 if ddp else ranks
    assert 2 * numel * copies - ranks * blanks - aside <= fewer <= 2 * numel * copies
    live = sum(a.live_bytes - b.live_bytes for a, b in zip(plain, ours, strict=True))
    assert abs(live - fewer) <= ranks * blanks
    share = numel / ranks if ddp else numel
    assert costs[0].memory.optimizer - costs[1].memory.optimizer == pytest.approx(
        (2 - ASIDE) * share
    )
    for steps, cost in zip((plain, ours), costs, strict=True):
        held = sum(one.state_bytes for one in steps) / ranks
        assert abs(held - cost.memory.optimizer) <= 0.01 * cost.memory.optimizer


@pytest.mark.parametrize("ranks", [1, 2])
def test_ties_rest_where_nothing_moves_them(gloo_pool: GlooPool, ranks: int) -> None:
    """With second moments that are zero."""
    ddp = DISTRIBUTED if ranks == 2 else {}
    values = {**DENSE, **BF16, **ddp, **BUCKET, "optimizer.weight_decay": 0.0}
    assert gloo_pool.run(resting_ties, ranks, values, NAME) == [[]] * ranks


@pytest.mark.parametrize(
    ("more", "ranks"),
    [pytest.param({}, 1, id="one rank"), pytest.param(DISTRIBUTED, 2, id="distributed")],
)
def test_master_weights_follow_weights_that_are_loaded(
    gloo_pool: GlooPool, more: Mapping[str, Any], ranks: int
) -> None:
    values = {**DENSE, **BF16, **more}
    plain = gloo_pool.run(reloaded, ranks, values, ())
    ours = gloo_pool.run(reloaded, ranks, {**values, **BUCKET}, NAME)
    for at in range(2):
        want, got = (full_tensors([rank[at] for rank in one]) for one in (plain, ours))
        assert got.problems() == want.problems() == []
        assert_equal(got.tensors, want.tensors)


@pytest.mark.exhaustive(by=lambda begun, resumed: enumerate([bool(begun[0]), bool(resumed[0])]))
@pytest.mark.parametrize(
    ("begun", "resumed"),
    [
        pytest.param((NAME, DISTRIBUTED, 2), (NAME, {}, 1), id="dp2 to one rank"),
        pytest.param(((), {}, 1), (NAME, DISTRIBUTED, 2), id="without to dp2 with"),
        pytest.param((NAME, DISTRIBUTED, 2), ((), {}, 1), id="dp2 with to without"),
    ],
)
def test_checkpoints_are_those_of_a_run_without_it(
    gloo_pool: GlooPool, tmp_path: Path, begun: Any, resumed: Any
) -> None:
    """Saved, loaded into another number of ranks, and after more steps, all bitwise."""
    values = {**DENSE, **BF16, **BUCKET}
    plain, plain_after = compared_checkpoints(gloo_pool, tmp_path, values, begun, resumed)
    mains = [key for key in plain if key.startswith("optimizer/main_param/")]
    assert mains
    assert all(plain[key].dtype == torch.float32 for key in mains)
    assert any(not torch.equal(plain[key], plain_after[key]) for key in mains)


@pytest.mark.exhaustive(by=lambda more: more)
@pytest.mark.parametrize(
    ("more", "ranks"),
    [pytest.param({}, 1, id="one rank"), pytest.param(OVERLAPPED, 2, id="overlapped")],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, more: Mapping[str, Any], ranks: int
) -> None:
    """Fingerprints, which read master weights in each step, are those of a run without it."""
    values = {**DENSE, **BF16, **BUCKET, **more}
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
        **OVERLAPPED,
        "plugins.ema-adamw.decay": 0.7,
        "plugins.ema-adamw.evaluate": True,
        "train.eval_interval": 2,
    }
    runs = Runs(gloo_pool, tmp_path, (values, 2, ("ema-adamw",)))
    plain = runs("plain")
    runs.plugins, runs.values = ("ema-adamw", *NAME), {**values, **BUCKET}
    ours = runs("ours")
    for one, other in zip(ours, plain, strict=True):
        assert one.readings == other.readings
        assert_equal(one.tensors, other.tensors)
    assert any("eval_loss" in line for line in plain[0].readings)
