"""Scaled rotary positions against transformers' own functions, which compute in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ascend_run.core.config.rotary_keys import PREFIX
from ascend_run.core.model.rotary import RotaryTable
from ascend_run.core.model.rotary_scaling import rotary_scaling
from ascend_run.plugin_api import RunConfig
from ascend_run.prepare.checks.rotary import rotary_problems
from tests.support.tiny_configs import config_with

WIDTH, HEADS, LONGEST = 16, 2, 128
CPU = torch.device("cpu")

factors = st.floats(1.0, 32.0)
originals = st.sampled_from([16, 32, 64, 128])
lists = st.lists(st.floats(0.5, 8.0), min_size=WIDTH // 2, max_size=WIDTH // 2)


def parameters() -> st.SearchStrategy[dict[str, Any]]:
    common = {"factor": factors, "original_max_position_embeddings": originals}
    optional = {"attention_factor": st.floats(0.5, 2.0)}
    yarn = {
        **optional,
        "beta_fast": st.floats(4.0, 64.0),
        "beta_slow": st.floats(0.5, 3.0),
        "mscale": st.floats(0.5, 1.5),
        "mscale_all_dim": st.floats(0.5, 1.5),
        "truncate": st.booleans(),
    }
    waves = {"low_freq_factor": st.floats(0.5, 2.0), "high_freq_factor": st.floats(2.5, 6.0)}
    longs = {"short_factor": lists, "long_factor": lists}
    originals_only = {"original_max_position_embeddings": originals}

    def of(kind: str, needed: Mapping[str, Any], free: Mapping[str, Any]) -> Any:
        found = st.fixed_dictionaries({"rope_type": st.just(kind), **needed}, optional=dict(free))
        return found

    return st.one_of(
        of("linear", {"factor": factors}, {}),
        of("dynamic", {"factor": factors}, {}),
        of("yarn", common, yarn),
        of("llama3", {**common, **waves}, {}),
        of("longrope", {**originals_only, **longs}, {**optional, "factor": factors}),
    )


def ours(given: Mapping[str, Any]) -> RunConfig:
    named = {
        f"model__{PREFIX}{name}".replace("rope_scaling_rope_type", "rope_scaling_type"): value
        for name, value in given.items()
    }
    return config_with(
        model__hidden_size=WIDTH * HEADS,
        model__num_attention_heads=HEADS,
        model__max_position_embeddings=LONGEST,
        **named,
    )


@settings(max_examples=150, deadline=None)
@given(parameters(), st.sampled_from([8, 100, 128, 200, 1000]), st.sampled_from([100.0, 10000.0]))
def test_angles_and_magnitude_are_those_of_transformers(
    given: dict[str, Any], seq_length: int, base: float
) -> None:
    config = LlamaConfig(
        hidden_size=WIDTH * HEADS,
        num_attention_heads=HEADS,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": base, **given},
    )
    theirs = ROPE_INIT_FUNCTIONS[given["rope_type"]]
    # Only these two know the length.
    length = seq_length if given["rope_type"] in ("dynamic", "longrope") else None
    wanted, magnitude = theirs(config, CPU, seq_len=length)
    scaling = rotary_scaling(ours(given))
    assert scaling is not None
    found = scaling.frequencies(WIDTH, base, seq_length)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, wanted.double(), rtol=2e-5, atol=1e-12)
    assert scaling.magnitude(seq_length) == pytest.approx(magnitude, rel=1e-12)


def test_a_table_has_the_angles_and_the_magnitude() -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaling = rotary_scaling(ours(given))
    assert scaling is not None
    cos, sin = RotaryTable(WIDTH, 100.0, scaling=scaling)(40, torch.float64, CPU)
    angles = torch.outer(torch.arange(40.0).double(), scaling.frequencies(WIDTH, 100.0, 40))
    magnitude = 0.1 * torch.tensor(4.0).double().log() + 1.0
    torch.testing.assert_close(cos[:, : WIDTH // 2], angles.cos() * magnitude, rtol=0, atol=1e-14)
    torch.testing.assert_close(sin[:, WIDTH // 2 :], angles.sin() * magnitude, rtol=0, atol=1e-14)


def test_angles_of_a_longer_sequence_are_taken_anew() -> None:
    scaling = rotary_scaling(ours({"rope_type": "dynamic", "factor": 2.0}))
    table = RotaryTable(WIDTH, 100.0, scaling=scaling)
    short, longer = (table(n, torch.float64, CPU) for n in (LONGEST, 2 * LONGEST))
    assert not torch.allclose(short[:, 1], longer[:, 1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_type": "linear"}, "rope_scaling_type=linear needs model.rope_scaling_factor"),
        ({"factor": 2.0}, "rope_scaling_factor=2.0 needs model.rope_scaling_type"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 2.0}, "beta_fast is not read by"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [-1.0] * 8},
            "short_factor has 1 numbers; a head has 8 pairs",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "low_freq_factor=4.0 must be below",
        ),
    ],
    ids=str,
)
def test_mismatching_parameters_are_reported(given: dict[str, Any], expected: str) -> None:
    assert any(expected in problem for problem in rotary_problems(ours(given)))


def test_a_scaling_needs_rotary_positions() -> None:
    config = config_with(
        model__position_embedding_type="learned_absolute",
        model__rope_scaling_type="linear",
        model__rope_scaling_factor=2.0,
    )
    assert len([*rotary_problems(config)]) == 2
