"""Multi-latent attention in a config: compatible settings, and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ascend_run.core.config.latent_attention import head_widths, latent_softmax_scale
from ascend_run.prepare.checks.latent_attention import latent_problems
from tests.support.tiny_configs import config_with

LATENT = {"model__multi_latent_attention": True, "model__position_embedding_type": "rope"}


def problems(**values: Any) -> list[str]:
    return [*latent_problems(config_with(**values))]


def test_the_widths_of_a_head() -> None:
    latent = config_with(**LATENT, model__v_head_dim=96)
    assert vars_of(head_widths(latent.model)) == (192, 96, 64)
    plain = config_with(model__kv_channels=8, model__rotary_percent=0.5)
    assert vars_of(head_widths(plain.model)) == (8, 8, 4)


def vars_of(widths: Any) -> tuple[int, int, int]:
    return widths.key, widths.value, widths.rotated


def test_the_scale_has_the_square_of_yarns_magnitude() -> None:
    config = config_with(**LATENT, model__mscale_all_dim=0.5, model__rotary_scaling_factor=10.0)
    magnitude = 0.05 * math.log(10.0) + 1.0
    assert latent_softmax_scale(config.model) == pytest.approx(magnitude**2 / math.sqrt(192))


def test_latent_attention_as_it_is_has_no_problem() -> None:
    assert problems(**LATENT) == []
    assert problems(**LATENT, model__rope_type="yarn", model__mscale=0.7) == []
    assert problems(**LATENT, model__rope_scaling_type="longrope") == []
    assert problems() == []


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_query_groups", 2, "each of model.num_attention_heads"),
        ("kv_channels", 16, "set model.qk_head_dim"),
        ("rope_scaling_type", "yarn", "set model.rope_type='yarn'"),
        ("rotary_percent", 0.5, "which RoPE rotates in full"),
        ("qk_pos_emb_head_dim", 7, "model.qk_pos_emb_head_dim=7 is odd"),
        ("position_embedding_type", "none", "use 'rope'"),
        ("softmax_scale", 0.1, "follows from the widths"),
        ("mscale", 0.7, "needs model.rope_type='yarn'"),
    ],
)
def test_incompatible_settings_are_reported(name: str, value: Any, told: str) -> None:
    (problem,) = problems(**{**LATENT, f"model__{name}": value})
    assert f"model.{name}" in problem
    assert told in problem


def test_its_fields_are_idle_without_it() -> None:
    (problem,) = problems(model__kv_lora_rank=64)
    assert problem == "model.kv_lora_rank=64 needs model.multi_latent_attention=true"
    (problem,) = problems(model__latent_rotary_interleaved=False)
    assert (
        problem == "model.latent_rotary_interleaved=false needs model.multi_latent_attention=true"
    )
