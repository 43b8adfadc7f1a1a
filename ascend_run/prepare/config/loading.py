"""Resolve a config: apply defaults, check types and bounds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ascend_run.core.config.megatron_fields import megatron_fields
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import FieldSection, RunConfig

from .bounds import REQUIRED, bound_problem
from .model_keys import ModelKeys
from .raw import RawConfig, RawValue
from .reading import nearest_section, read_raw
from .schema import SECTION_CLASSES, SECTIONS, TOP_LEVEL, Option, all_options
from .unsupported import refusal
from .value_types import TypeMismatch, describe

__all__ = ["RawConfig", "ResolvedConfig", "build_config", "read_raw"]


@attrs.frozen
class ResolvedConfig:
    """The config of a run with the origin of each value."""

    config: RunConfig
    origins: Mapping[str, str]
    """Maps a key such as ``model.num_layers`` to its origin.

    Origins are ``default``, ``Megatron's default``, ``plugin default``, ``plugin 'name'``, ``family
    'llama'``, ``checkpoints/llama/config.json``, ``demo.toml:12`` or ``command line``.
    """


def build_config(
    raw: RawConfig,
    option_classes: Mapping[str, type | None],
    family_defaults: Mapping[str, object],
    enable: tuple[str, ...],
    *,
    hf_values: Mapping[str, object] | None = None,
    plugin_defaults: Mapping[str, tuple[str, object]] | None = None,
) -> ResolvedConfig:
    """Resolve all values and check each on its own.

    Later layers override earlier ones: defaults, ``plugin_defaults``, ``family_defaults``,
    ``hf_values``, what the user wrote. ``run_problems`` checks consistency between values.

    Args:
        option_classes: Maps each active plugin (feature, platform, task, family) to its options
            class.
        family_defaults: Values of the model's family, keyed like ``model.normalization``.
        enable: Canonical names of feature plugins in resolved order.
        hf_values: Values from the ``config.json`` in ``model.hf_path``, keyed alike.
        plugin_defaults: What ``ascend_defaults`` returns: key -> (plugin, value).

    Raises:
        ConfigError: Lists every unknown key, wrong type and value out of bounds.
    """
    options = all_options(option_classes)
    problems = list(raw.problems)
    problems += _unknown_keys(raw, options, option_classes, enable)
    given = _given(raw, family_defaults, hf_values or {}, plugin_defaults or {})
    problems += [
        f"{key}: the installed Megatron has no such option ({given[key].origin})"
        for key in given.keys() - options.keys() - raw.values.keys()
    ]
    values, origins = _resolve(given, options, problems)
    sections: dict[str, Any] = {
        name: _instance(section_class, name, values, origins, problems)
        for name, section_class in SECTION_CLASSES.items()
    }
    plugins = {
        name: _instance(options_class, f"plugins.{name}", values, origins, problems)
        for name, options_class in option_classes.items()
        if options_class is not None
    }
    _instance(ModelKeys, "model", values, origins, problems)
    if problems:
        raise ConfigError("the config cannot be used", problems)
    config = RunConfig(
        enable=tuple(enable),
        platform=raw.platform,
        task=raw.task,
        model=_field_section("model", values),
        parallel=_field_section("parallel", values),
        plugins=plugins,
        **sections,
    )
    for key in TOP_LEVEL:
        origins[key] = raw.values[key].origin if key in raw.values else "default"
    return ResolvedConfig(config, origins)


def _given(
    raw: RawConfig,
    family_defaults: Mapping[str, object],
    hf_values: Mapping[str, object],
    plugin_defaults: Mapping[str, tuple[str, object]],
) -> dict[str, RawValue]:
    family, hf = f"family {raw.family!r}", f"{raw.hf_path}/config.json"
    return {
        **{key: RawValue(value, f"plugin '{p}'") for key, (p, value) in plugin_defaults.items()},
        **{key: RawValue(value, family) for key, value in family_defaults.items()},
        **{key: RawValue(value, hf) for key, value in hf_values.items()},
        **({"model.family": RawValue(raw.family, hf)} if raw.hf_path else {}),
        **raw.values,
    }


def _resolve(
    given: Mapping[str, RawValue], options: Mapping[str, Option], problems: list[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return value and origin of every option; a rejected value is replaced by the default."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for key, option in options.items():
        values[key], origins[key] = option.default, option.origin
        if key in given:
            problem = _take(given[key], option, values)
            origins[key] = given[key].origin
        else:
            missing = option.default is attrs.NOTHING or key in REQUIRED
            problem = f"{key} is missing; expected {describe(option.type)}" if missing else None
        if problem:
            problems.append(problem)
    return values, origins


def _take(given: RawValue, option: Option, values: dict[str, Any]) -> str | None:
    """Store a given value; return the problem if it is rejected."""
    where = f" ({given.origin})"
    field = option.megatron
    if field is not None and field.type is None:
        return f"{option.key} cannot be set: {refusal(field, given.value)}{where}"
    try:
        value = given.structured(option.type, option.name)
    except TypeMismatch as mismatch:
        return f"{option.key}={show(given.value)}: expected {mismatch}{where}"
    if field is not None and value is None and option.default is not None:
        return f"{option.key} cannot be unset; leave it out for {show(option.default)}{where}"
    if field is not None and (why := refusal(field, value)):
        return f"{option.key}={show(value)} cannot be used: {why}{where}"
    if field is not None or option.key in REQUIRED:
        for number in value if isinstance(value, list | tuple) else [value]:
            if bound := bound_problem(option.name, number):
                return f"{option.key}={show(value)} {bound}{where}"
    values[option.key] = value
    return None


def _unknown_keys(
    raw: RawConfig,
    options: Mapping[str, Option],
    option_classes: Mapping[str, type | None],
    enable: Sequence[str],
) -> Iterator[str]:
    for key, given in raw.values.items():
        if key in options or key in TOP_LEVEL:
            continue
        section, _, name = key.rpartition(".")
        plugin = re.match(r"plugins\.([^.]*)", key)
        where = f" ({given.origin})"
        if plugin and plugin[1] not in option_classes:
            near = difflib.get_close_matches(plugin[1], option_classes, n=1, cutoff=0.75)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"add it: --enable {','.join([*enable, plugin[1]])}"
            )
            yield f"{key}: {plugin[1]!r} is not enabled; {hint}{where}"
        elif section not in SECTIONS and not plugin:
            yield f"{key}: unknown section {section or key!r}{nearest_section(section)}{where}"
        else:
            yield f"{key}: unknown option{_nearest_option(section, name, options)}{where}"


def _nearest_option(section: str, name: str, options: Mapping[str, Option]) -> str:
    elsewhere = [option.key for option in options.values() if option.name == name]
    if elsewhere:
        return f"; there is {' and '.join(elsewhere)}"
    siblings = [option.name for option in options.values() if option.section == section]
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"; did you mean {section}.{near[0]}?"
    if len(siblings) <= 12:
        return f"; {section} has {', '.join(siblings) or 'no options'}"
    return ""


def _instance(
    section_class: type,
    prefix: str,
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    problems: list[str],
) -> Any:
    """Build an attrs instance; validate each value separately so that all problems are reported."""
    attributes = [attribute for attribute in attrs.fields(section_class) if attribute.init]
    chosen = {attribute.alias: values[f"{prefix}.{attribute.name}"] for attribute in attributes}
    found = []
    for attribute in attributes:
        if attribute.validator is None:
            continue
        value = chosen[attribute.alias]
        try:
            attribute.validator(None, attribute, value)
        except (ValueError, TypeError) as error:
            key = f"{prefix}.{attribute.name}"
            found.append(f"{key}={show(value)} {_reason(error, attribute)} ({origins[key]})")
        except AttributeError:  # compares with other attributes: validated by the constructor
            continue
    problems += found
    if found or attrs.NOTHING in chosen.values():
        return None
    try:
        return section_class(**chosen)
    except (ValueError, TypeError) as error:
        problems.append(f"{prefix}: {error.args[0] if error.args else error}")
        return None


def _reason(error: Exception, attribute: attrs.Attribute[Any]) -> str:
    """Return a validator's message without name and value, which the caller adds."""
    text = str(error.args[0]) if error.args else type(error).__name__
    text = re.sub(rf"^'?{re.escape(attribute.name)}'?\s+", "", text)
    text = re.sub(r"(: -?[\w.+-]+| \(got .*\)|, got .*)$", "", text, flags=re.DOTALL)
    return text.replace("must be in (", "must be one of (")


def _field_section(section: str, values: Mapping[str, Any]) -> FieldSection:
    """Return Megatron's configurable fields, and for ``model`` our own keys."""
    fields = megatron_fields()
    refused = {
        name
        for name, field in fields.items()
        if field.type is None or refusal(field, values[f"{field.section}.{name}"])
    }
    return FieldSection(
        {
            name: value
            for key, value in values.items()
            if key.startswith(f"{section}.") and (name := key.split(".")[1]) not in refused
        }
    )
