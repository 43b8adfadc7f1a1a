"""Ranks and alphas of modules by the patterns of ``adapter_config.json``, against PEFT's rule."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.ops.linear.peft_settings import alpha_of, pattern_of, rank_of

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


def test_a_pattern_gives_every_module_its_value() -> None:
    values = {"h.0.attn.c_proj": 2, "h.0.mlp.c_proj": 3, "h.0.mlp.c_fc": 8, "h.0.attn.c_attn": 5}
    found = pattern_of(values, 8)
    assert found == {"c_attn": 5, "h.0.attn.c_proj": 2, "h.0.mlp.c_proj": 3}
    assert {name: rank_of({"r": 8, "rank_pattern": found}, name) for name in values} == values
    assert pattern_of(dict.fromkeys(values, 8), 8) == {}
