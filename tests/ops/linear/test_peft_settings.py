"""Ranks and alphas of modules by the patterns of ``adapter_config.json``, against PEFT's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ascend_run.ops.linear.peft_settings import alpha_of, rank_of
from ascend_run.ops.linear.peft_writing import Adapted, written_settings

MODULES = [f"model.layers.{n}.self_attn.{name}" for n in (1, 11) for name in ("q_proj", "k_proj")]


@pytest.mark.parametrize(
    "pattern",
    [
        {},
        {"q_proj": 2},
        {"layers.1.self_attn.q_proj": 2, "q_proj": 3},
        {".*layers.1.*": 2},
        {"proj": 2},
        {"[qk]_proj": 2, "k_proj": 3},
        {"model.layers.11.self_attn.k_proj": 5},
        {"q_proj|k": 7},
    ],
    ids=str,
)
def test_a_module_has_the_value_that_peft_gives_it(pattern: dict[str, Any]) -> None:
    from peft.utils.other import get_pattern_key

    config = {"r": 8, "lora_alpha": 4, "rank_pattern": pattern, "alpha_pattern": pattern}
    for module in MODULES:
        key = get_pattern_key(pattern.keys(), module)
        assert rank_of(config, module) == pattern.get(key, 8)
        assert alpha_of(config, module) == pattern.get(key, 4)


def written(
    values: Mapping[str, float], others: Sequence[str] = (), stacked: str = ".experts."
) -> dict[str, Any]:
    adapted = [
        Adapted(name=name, rank=int(value), alpha=value / 2, is_stacked=stacked in name)
        for name, value in values.items()
    ]
    settings: Any = written_settings(adapted, others, rank=8, alpha=4.0, more={"use_dora": False})
    assert [*settings] == sorted(settings)
    for name, value in values.items():
        assert rank_of(settings, name) == value, name
        assert alpha_of(settings, name) == value / 2, name
    return dict(settings)


def test_a_pattern_gives_every_module_its_value() -> None:
    values = {"h.0.attn.c_proj": 2, "h.0.mlp.c_proj": 3, "h.0.mlp.c_fc": 8, "h.0.attn.c_attn": 5}
    found = written(values)
    assert found["rank_pattern"] == {"attn.c_proj": 2, "c_attn": 5, "mlp.c_proj": 3}
    assert found["alpha_pattern"] == {"attn.c_proj": 1, "c_attn": 2.5, "mlp.c_proj": 1.5}
    found = written(dict.fromkeys(values, 8))
    assert found["rank_pattern"] == found["alpha_pattern"] == {}


@pytest.mark.parametrize("dense", [6, 8])
@pytest.mark.parametrize("experts", [6, 8, 3])
def test_a_dense_mlp_and_experts_have_their_own_values(dense: int, experts: int) -> None:
    """The names of both end in the same word."""
    values = {
        "model.layers.0.mlp.down_proj": dense,
        "model.layers.0.mlp.up_proj": 8,
        "model.layers.1.mlp.experts.down_proj": experts,
        "model.layers.1.mlp.experts.gate_up_proj": 5,
        "model.layers.1.self_attn.o_proj": 2,
        "model.layers.1.self_attn.kv_o_proj": 4,
    }
    frozen = [f"model.layers.1.mlp.shared_experts.{name}_proj" for name in ("up", "down")]
    found = written(values, frozen)
    assert found["target_modules"] == ["kv_o_proj", "mlp.down_proj", "mlp.up_proj", "o_proj"]
    assert found["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def test_full_names_select_some_layers_of_many() -> None:
    values = {f"model.layers.{layer}.mlp.up_proj": 8 + layer % 2 for layer in (1, 2, 11)}
    found = written(values, [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 12)])
    assert found["target_modules"] == sorted(["1.mlp.up_proj", "2.mlp.up_proj", "11.mlp.up_proj"])
    assert found["rank_pattern"] == {"1.mlp.up_proj": 9, "11.mlp.up_proj": 9}
