"""Convert config.json to ``[model]`` and back with a family's data. Torch-free."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.core.config.rotary_keys import PREFIX
from ascend_run.core.hugging_face.derived_fields import (
    UNREPRESENTED,
    completed_model,
    derived_value,
)
from ascend_run.plugin_api.contracts import ConfigKey, KeyForm, ModelFamily
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.prepare.config.bounds import LARGEST_COUNTS
from ascend_run.types.config import FieldSection, RunConfig

from .latent_rope import LATENT_FIELDS, latent_rope, latent_rope_problems
from .layer_rope import nest_rope_parameters
from .neutral_fields import TRAINING_ONLY, neutral_fields
from .rope import rope_keys, take_rope
from .score_heads import take_labels

_LARGEST_COUNT: Final = 2**31 - 1
_DEPTHS: Final = "num_nextn_predict_layers"
_UNUSED_UNTRAINED: Final = TRAINING_ONLY | {"model.attention_dropout", "model.init_method_std"}


def config_from_hf(family: ModelFamily, config_json: Mapping[str, Any]) -> dict[str, object]:
    """Convert a config.json to our fields.

    Returns:
        Maps keys such as ``model.num_layers`` to values, for every key that the family maps. Does
        not include the family's ``defaults``.

    Raises:
        ConfigError: Lists every key that is unknown, missing, of the wrong type, or has a value
            that the family cannot represent.
    """
    remaining = _flat(family, config_json)
    values = take_labels(family, remaining)
    problems = _identity_problems(family, remaining)
    rotates_a_part = any(key.hf == "partial_rotary_factor" for key in family.keys)
    problems += take_rope(remaining, values, partial=rotates_a_part, more=family.rope_parameters)
    if family.defaults.get("model.multi_latent_attention"):
        problems += latent_rope(values)
    formed: list[tuple[ConfigKey, KeyForm, Any]] = []
    for key in family.keys:
        if key.also in remaining:
            value = remaining.pop(key.also)
            if remaining.setdefault(key.hf, value) != value:
                problems.append(f"{key.hf} and {key.also} are one key, and differ; leave one")
        if key.hf not in remaining and key.default is attrs.NOTHING:
            problems.append(f"{key.hf} is missing; {family.architecture} needs it")
            continue
        value = remaining.get(key.hf, key.default)
        if expected := _expectation(key, value):
            problems.append(f"{key.hf} is {value!r}; expected {expected}")
            continue
        if key.form is not None:
            formed.append((key, key.form, value))
            continue
        if isinstance(key.default, float) and value is not None:
            value = float(value)
        if values.setdefault(key.field, value) != value:
            other = next(other.hf for other in family.keys if other.field == key.field)
            problems.append(
                f"{other} is {values[key.field]!r} and {key.hf} is {value!r}; both are "
                f"{key.field}, so they must be equal"
            )
    for key in family.keys:
        remaining.pop(key.hf, None)
    for name, only in family.fixed.items():
        accepted = only if isinstance(only, tuple) else (only,)
        value = remaining.pop(name, accepted[0])
        if not any(_same(value, one) for one in accepted):
            expected = " or ".join(map(repr, accepted))
            problems.append(f"{name} is {value!r}; only {expected} is supported")
    problems += [_unknown(name, family) for name in sorted({*remaining} - family.ignored)]
    if not problems:
        problems += _take_formed(formed, values)
        problems += _head_problems(family, values)
    if problems:
        raise ConfigError(
            f"config.json is not a {family.model_type} config that can be built", problems
        )
    return values


def config_to_hf(family: ModelFamily, config: RunConfig) -> dict[str, object]:
    """Build a config.json for a run's model; the inverse of ``config_from_hf`` on valid input.

    Raises:
        ConfigError: Lists every field that the family's Hugging Face class cannot represent.
    """
    model, mapped = completed_model(config), mapped_fields(family)
    if _DEPTHS in family.ignored:  # folders may have the key and not the layers, so not read
        mapped.add("model.mtp_num_layers")
    expected = {field: value for field, value in family.defaults.items() if field not in mapped}
    for name, neutral in neutral_fields().items():
        if f"model.{name}" not in mapped:
            expected.setdefault(f"model.{name}", neutral)
    for name in UNREPRESENTED:
        if f"model.{name}" not in mapped:
            expected.setdefault(f"model.{name}", derived_value(config, name))
    problems = [
        f"{field} is {value!r}; {family.architecture} has only {only!r}"
        for field, only in expected.items()
        if field not in TRAINING_ONLY and not _same(value := _value(model, field, only), only)
    ]
    written = _written(family, model, problems)
    problems += latent_rope_problems(config)
    if problems:
        raise ConfigError(
            f"this model cannot be written as a Hugging Face {family.model_type}", problems
        )
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **written,
        **{k: v[0] if isinstance(v, tuple) else v for k, v in family.fixed.items()},
    }
    if _DEPTHS in family.ignored and config.model.mtp_num_layers:
        result[_DEPTHS] = config.model.mtp_num_layers
    if "rope_theta" in result:
        result |= rope_keys(result["rope_theta"], config)
        nest_rope_parameters(result)
    for name in [name for name in result if "." in name]:
        outer, _, inner = name.partition(".")
        result.setdefault(outer, {})[inner] = result.pop(name)
    config_from_hf(family, result)  # what cannot be read back is not written
    return dict(sorted(result.items()))


def mapped_fields(family: ModelFamily) -> set[str]:
    """Return the fields, such as ``model.num_layers``, that a config.json may set."""
    mapped = {"model.num_labels", *(key.field for key in family.keys)}
    if any(key.hf == "rope_theta" for key in family.keys):
        mapped.add("model.rope_scaling_type")
        mapped |= {f"model.{PREFIX}{name}" for name in family.rope_parameters}
    return mapped


def folder_differences(family: ModelFamily, config: RunConfig, other: RunConfig) -> list[str]:
    """Return the fields of ``[model]`` that a folder gives otherwise, with both values.

    Args:
        other: The config, with the model of that folder.
    """
    fields = {*mapped_fields(family), *family.defaults, *LATENT_FIELDS} - _UNUSED_UNTRAINED
    if config.model.position_embedding_type == "rope" and not config.model.rope_scaling_type:
        fields.discard("model.max_position_embeddings")  # only a limit of lengths
    here, there = completed_model(config), completed_model(other)
    return [
        f"model.{name} is {show(there[name])} there and {show(here[name])} here"
        for name in here
        if (f"model.{name}" in fields or name.startswith(PREFIX)) and there[name] != here[name]
    ]


def _written(family: ModelFamily, model: FieldSection, problems: list[str]) -> dict[str, object]:
    """Return the keys of a config.json; add fields that they cannot represent to ``problems``."""
    written: dict[str, object] = {}
    for key in family.keys:
        try:
            value = _theirs(key, model)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        if value is None and not (key.form or key.default is None or key.nullable):
            problems.append(f"{key.field} is None; {family.architecture} needs it")
        elif not _same(written.setdefault(key.hf, value), value):
            other = next(other.field for other in family.keys if other.hf == key.hf)
            problems.append(
                f"{other} is {written[key.hf]!r} and {key.field} is {value!r}; both are {key.hf}, "
                "so they must be equal"
            )
    return written


def _theirs(key: ConfigKey, model: FieldSection) -> Any:
    """Convert our value of a key; None if the installed Megatron has none."""
    value = _value(model, key.field, None)
    if key.form is None:
        return value
    try:
        theirs = key.form.to_theirs(value, model)
    except ValueError as problem:
        raise ValueError(f"{key.field} is {show(value)}; {problem}") from None
    return key.default if theirs is attrs.NOTHING else theirs


def _flat(family: ModelFamily, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys, with those of an object under names of their own: ``rotary.base``."""
    flat = dict(config_json)
    for outer in {key.hf.partition(".")[0] for key in family.keys if "." in key.hf}:
        if isinstance(flat.get(outer), dict):
            flat = {f"{outer}.{name}": value for name, value in flat.pop(outer).items()} | flat
    return flat


def _identity_problems(family: ModelFamily, remaining: dict[str, object]) -> list[str]:
    problems = []
    if (model_type := remaining.pop("model_type", None)) != family.model_type:
        problems.append(
            f"model_type is {model_type!r}; the family {family.model_type!r} was chosen: "
            "set model.family to the model's own"
        )
    architectures = remaining.pop("architectures", None)
    known = [family.architecture, *family.former_architectures]
    if architectures is not None and architectures not in [[name] for name in known]:
        problems.append(f"architectures is {architectures!r}; expected [{family.architecture!r}]")
    return problems


def _take_formed(
    formed: Iterable[tuple[ConfigKey, KeyForm, Any]], values: dict[str, Any]
) -> Iterator[str]:
    """Convert the keys that have a form, in place; yield those that have no counterpart."""
    for key, form, value in formed:
        try:
            ours = form.to_ours(value, values)
        except ValueError as problem:
            yield f"{key.hf} is {value!r}: {problem}"
            continue
        if ours is not attrs.NOTHING:
            values[key.field] = ours


def _expectation(key: ConfigKey, value: Any) -> str | None:
    """Return the expected value of a key, derived from its default; None if the value is valid.

    A key without a default or with an integer default is a count. A key with the default None, or
    one that Hugging Face derives from other keys, may be null.
    """
    default = key.default
    least = 1 if key.form is None else key.form.least
    if least is None or (value is None and (default is None or key.nullable)):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, float):
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        # Compare before converting: an integer may be too large for a float.
        return None if sound and 0 <= value <= 1e30 and math.isfinite(value) else "a number >= 0"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a string"
    is_count = isinstance(value, int) and not isinstance(value, bool)
    most = LARGEST_COUNTS.get(key.field.removeprefix("model."), _LARGEST_COUNT)
    if is_count and least <= value:
        return None if value <= most else f"at most {most}"
    return "a whole number above 0" if least else "a whole number >= 0"


def _head_problems(family: ModelFamily, values: Mapping[str, Any]) -> list[str]:
    names = {key.field: key.hf for key in family.keys}
    heads, groups = values.get("model.num_attention_heads"), values.get("model.num_query_groups")
    hidden, width = values.get("model.hidden_size"), values.get("model.kv_channels")
    named_heads = f"{names.get('model.num_attention_heads')} ({heads})"
    problems = []
    if heads and groups and heads % groups:
        problems.append(
            f"{names['model.num_query_groups']} is {groups}; it must divide {named_heads}"
        )
    if heads and hidden and not width and hidden % heads:
        width_key = names.get("model.kv_channels")
        without = f"without a {width_key} " if width_key else ""
        problems.append(
            f"{names['model.hidden_size']} is {hidden}; {without}it must be a multiple of "
            f"{named_heads}"
        )
    return problems


def _unknown(name: str, family: ModelFamily) -> str:
    if name == "quantization_config":
        return f"{name}: quantised weights are not read; save them dequantised (model.dequantize())"
    known = {*(key.hf for key in family.keys), *family.fixed, *family.ignored}
    near = " or ".join(map(repr, difflib.get_close_matches(name, known, n=2)))
    return f"unknown key {name!r}; {f'did you mean {near}?' if near else 'its effect is unknown'}"


def _same(value: Any, other: object) -> bool:
    """Return whether values are equal and not a bool and a number."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _value(model: FieldSection, field: str, absent: object) -> Any:
    """Return a field of ``[model]``; ``absent`` if the installed Megatron does not have it."""
    return model.get(field.removeprefix("model."), absent)
