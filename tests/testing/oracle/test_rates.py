"""Learning rates, and the angles of rotary positions, against the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from ascend_run.core.model.rotary_scaling import rotary_scaling
from ascend_run.ops.elementwise.rotary_scaling import frequencies
from ascend_run.testing.models import MODELS
from ascend_run.testing.oracle.optimizer import learning_rate
from ascend_run.testing.oracle.positions import alibi_slopes, rotary_of
from ascend_run.types.config import OptimizerSection
from tests.support.small_runs import prepare

STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": style, "lr_warmup_iters": warmup}
    for style in ("constant", "linear", "cosine")
    for warmup in (0, 3)
] + [
    {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 4}
    for style in ("exponential", "linear", "cosine", "minus_sqrt")
]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_the_learning_rate_is_that_of_megatron(style: dict[str, Any]) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options = OptimizerSection(lr=1e-3, min_lr=1e-4, lr_decay_iters=10, **style)
    config = attrs.evolve(prepare(MODELS["dense"]).config, optimizer=options)
    weight = torch.nn.Parameter(torch.ones(1))
    scheduler = OptimizerParamScheduler(
        torch.optim.AdamW([weight]),
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters,
        lr_decay_steps=10,
        lr_decay_style=options.lr_decay_style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=options.lr_wsd_decay_iters,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )
    for step in range(14):
        assert learning_rate(config, step) == pytest.approx(scheduler.get_lr({}), rel=1e-12)
        scheduler.step(1)


SCALINGS: list[Mapping[str, Any]] = [
    {"type": "linear", "factor": 3.0},
    {"type": "dynamic", "factor": 3.0},
    {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8},
    {"type": "yarn", "factor": 3.0, "beta_fast": 2.0, "beta_slow": 0.5, "truncate": False},
    {"type": "yarn", "factor": 3.0, "mscale": 0.9, "mscale_all_dim": 0.7},
    {"type": "yarn", "factor": 3.0, "attention_factor": 1.2},
    {
        "type": "llama3",
        "factor": 3.0,
        "low_freq_factor": 0.1,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 40,
    },
    {"type": "longrope", "factor": 3.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 3, 4, 5]},
    {
        "type": "longrope",
        "factor": 3.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3, 4, 5],
        "long_mscale": 1.3,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("length", [6, 30])
def test_the_angles_of_a_scaling_are_those_of_a_run(
    scaling: Mapping[str, Any], length: int
) -> None:
    keys = {f"model.rope_scaling_{name}": value for name, value in scaling.items()}
    more = {"model.kv_channels": 8, "model.max_position_embeddings": 16, "model.rotary_base": 90.0}
    config = prepare({**MODELS["dense"], **more, **keys}).config
    ours, theirs = rotary_of(config, length, has_window=False), rotary_scaling(config)
    assert ours is not None
    assert theirs is not None
    expected = theirs.frequencies(8, 90.0, length)
    torch.testing.assert_close(ours.angle_P, expected, rtol=1e-14, atol=0)
    assert ours.magnitude == pytest.approx(theirs.magnitude(length), rel=1e-14)
    assert not torch.equal(expected, frequencies(8, 90.0)) or (length == 6)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12])
def test_the_slopes_of_alibi_are_those_of_a_run(heads: int) -> None:
    from ascend_run.ops.attention.alibi import slopes

    assert alibi_slopes(heads, 6.0) == slopes(heads, 6.0)
