"""Keys of config.json that have another form in ``[model]``, and what has none."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from ascend_run.families import forms, layer_types, optional_window, sliding_window
from ascend_run.families.windows import WINDOW_BELOW, WINDOW_FROM
from ascend_run.plugin_api import ConfigError, ConfigKey, KeyForm, ModelFamily
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.core.hugging_face.toy_families import DENSE as TOY
from tests.support.family_checks import run_config

GIVEN = {
    "model_type": TOY.model_type,
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
(WINDOW,), (TYPES,) = sliding_window(None), layer_types()
FULL, SLIDING = "full_attention", "sliding_attention"


def _key(hf: str, field: str, default: float, form: KeyForm | None) -> ConfigKey:
    return ConfigKey(hf=hf, field=f"model.{field}", default=default, form=form)


def family(*keys: ConfigKey) -> ModelFamily:
    return attrs.evolve(TOY, keys=(*TOY.keys, *keys))


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [
        (WINDOW, 5, (4, 0)),
        (WINDOW, None, None),
        (_key("scalar", "softmax_scale", 4, forms.INVERSE_SQUARE_ROOT), 25, 0.2),
        (_key("scale", "softmax_scale", 1.0, forms.SOFTMAX_SCALE), 0.3, 0.3),
        (_key("depth", "residual_multiplier", 1.0, forms.OVER_DEPTH), 1.4, 0.7),
        (_key("base", "logits_scaling", 1, forms.BASE_WIDTH), 8, 4.0),
        (_key("ratio", "rotary_base", 1.0, forms.ROPE_RATIO), 50.0, 5e5),
    ],
    ids=lambda value: value.form.name if isinstance(value, ConfigKey) else None,
)
def test_values_convert_both_ways(key: ConfigKey, theirs: Any, ours: Any) -> None:
    toy = family(key)
    if key.form is forms.ROPE_RATIO:
        toy = attrs.evolve(toy, keys=tuple(k for k in toy.keys if k.hf != "rope_theta"))
    given = {**GIVEN, key.hf: theirs}
    assert config_from_hf(toy, given)[key.field] == ours
    assert config_to_hf(toy, run_config(toy, given))[key.hf] == theirs


def test_kinds_of_layers_become_flags_and_return() -> None:
    toy = family(WINDOW, TYPES)
    kinds = [SLIDING, FULL, SLIDING, SLIDING]
    given = {**GIVEN, "sliding_window": 5, "layer_types": kinds}
    assert config_from_hf(toy, given)["model.window_attn_skip_freq"] == [1, 0, 1, 1]
    assert config_to_hf(toy, run_config(toy, given))["layer_types"] == kinds
    every = {**given, "layer_types": [SLIDING] * 4}
    assert config_from_hf(toy, every)["model.window_attn_skip_freq"] is None
    missing = {**GIVEN, "sliding_window": 5}
    assert "model.window_attn_skip_freq" not in config_from_hf(toy, missing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [SLIDING] * 4}, "sliding_attention needs a sliding_window"),
        ({"layer_types": [FULL] * 3}, "expected full_attention or sliding_attention for each of 4"),
        ({"layer_types": [FULL, FULL, FULL, "chunked"]}, "for each of 4 layers"),
        ({"layer_types": "full_attention"}, "for each of 4 layers"),
        ({"sliding_window": 0}, "sliding_window is 0; expected a whole number above 0"),
        ({"sliding_window": True}, "sliding_window is True; expected a whole number above 0"),
    ],
)
def test_windows_that_cannot_be_built_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(family(WINDOW, TYPES), {**GIVEN, **changes})


@pytest.mark.parametrize(
    ("form", "bound", "flags"),
    [
        (WINDOW_FROM, 1, [0, 1, 1, 1]),
        (WINDOW_FROM, 0, None),
        (WINDOW_FROM, 4, [0, 0, 0, 0]),
        (WINDOW_BELOW, 3, [1, 0, 1, 0]),
        (WINDOW_BELOW, 0, [0, 0, 0, 0]),
    ],
    ids=lambda value: value.name if isinstance(value, KeyForm) else None,
)
def test_a_bound_of_layers_with_a_window_becomes_flags_and_returns(
    form: KeyForm, bound: int, flags: list[int] | None
) -> None:
    toy = family(*optional_window(form))
    given = {
        **GIVEN,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": bound,
    }
    values = config_from_hf(toy, given)
    frequency = "model.window_attn_skip_freq"
    assert (values["model.window_size"], values[frequency]) == ((4, 0), flags)
    written = config_to_hf(toy, run_config(toy, given))
    assert {name: written[name] for name in given} == given
    named = {**given, "layer_types": [FULL, FULL, SLIDING, FULL]}
    assert config_from_hf(toy, named)[frequency] == [0, 0, 1, 0]
    unused = config_from_hf(toy, {**given, "use_sliding_window": False})
    assert unused["model.window_size"] is unused[frequency] is None


@pytest.mark.parametrize(
    "form",
    [forms.RECIPROCAL, forms.SOFTMAX_SCALE, forms.INVERSE_SQUARE_ROOT],
    ids=lambda form: form.name,
)
def test_a_factor_of_zero_is_refused(form: KeyForm) -> None:
    toy = family(ConfigKey(hf="scale", field="model.softmax_scale", default=1.0, form=form))
    with pytest.raises(ConfigError, match=r"scale is 0\.0: expected a number above 0"):
        config_from_hf(toy, {**GIVEN, "scale": 0.0})


def test_log_n_scaling_begins_at_the_maximum_length() -> None:
    key = ConfigKey(
        hf="use_logn_attn", field="model.log_n_scaling_length", default=True, form=forms.LOG_N
    )
    toy = family(key)
    given = {**GIVEN, "max_position_embeddings": 64}
    assert config_from_hf(toy, given)[key.field] == 64
    assert config_from_hf(toy, {**given, key.hf: False})[key.field] is None
    assert config_to_hf(toy, run_config(toy, given))[key.hf] is True
    assert config_to_hf(toy, run_config(toy, {**given, key.hf: False}))[key.hf] is False
    with pytest.raises(ConfigError, match="log_n_scaling_length is 32; only 64"):
        config_to_hf(toy, run_config(toy, given, log_n_scaling_length=32))


def test_a_window_to_the_right_is_not_written() -> None:
    toy = family(WINDOW, TYPES)
    with pytest.raises(
        ConfigError, match=r"window_size is \[4, 2\]; only \[keys before a query, 0\]"
    ):
        config_to_hf(toy, run_config(toy, GIVEN, window_size=(4, 2)))


def test_fields_of_one_key_must_agree_to_be_written() -> None:
    keys = tuple(
        ConfigKey(hf="projection_bias", field=f"model.{field}", default=False)
        for field in ("add_qkv_bias", "add_linear_proj_bias")
    )
    toy = family(*keys)
    both = run_config(toy, {**GIVEN, "projection_bias": True})
    assert both.model.add_qkv_bias is both.model.add_linear_proj_bias is True
    assert config_to_hf(toy, both)["projection_bias"] is True
    message = (
        "add_qkv_bias is True and model.add_linear_proj_bias is False; both are projection_bias"
    )
    with pytest.raises(ConfigError, match=message):
        config_to_hf(toy, run_config(toy, GIVEN, add_qkv_bias=True))


PARTIAL = ConfigKey(hf="partial_rotary_factor", field="model.rotary_percent", default=1.0)


@pytest.mark.parametrize(
    "spelling",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_a_part_of_a_head_is_rotated_in_either_spelling(spelling: dict[str, Any]) -> None:
    toy = family(PARTIAL)
    toy = attrs.evolve(
        toy, defaults={k: v for k, v in toy.defaults.items() if k != "model.rotary_percent"}
    )
    given = {**GIVEN, **spelling}
    assert config_from_hf(toy, given)["model.rotary_percent"] == 0.5
    written = config_to_hf(toy, run_config(toy, given))
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_two_parts_of_a_head_are_refused() -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.5 and partial"):
        config_from_hf(
            family(PARTIAL), {**GIVEN, "rope_parameters": rope, "partial_rotary_factor": 0.25}
        )


def test_another_name_of_a_key_is_read_and_not_written() -> None:
    toy = family(_key("rate", "logits_scaling", 1.0, None))
    toy = attrs.evolve(toy, keys=(*toy.keys[:-1], attrs.evolve(toy.keys[-1], also="former_rate")))
    assert config_from_hf(toy, {**GIVEN, "former_rate": 3.0})["model.logits_scaling"] == 3.0
    written = config_to_hf(toy, run_config(toy, {**GIVEN, "former_rate": 3.0}))
    assert (written["rate"], "former_rate" in written) == (3.0, False)
    with pytest.raises(ConfigError, match="rate and former_rate are one key, and differ"):
        config_from_hf(toy, {**GIVEN, "former_rate": 3.0, "rate": 2.0})
