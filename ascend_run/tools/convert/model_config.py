"""The config of a model to convert: of a run, of a Hugging Face folder, or from Megatron's args."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.core.hugging_face.json_files import read_hf_config, read_object
from ascend_run.plugin_api.contracts import ModelFamily
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError, ConfigError, PluginResolutionError
from ascend_run.plugin_api.implementations import implementations
from ascend_run.prepare.config.loading import ResolvedConfig, build_config
from ascend_run.prepare.config.printing import render_toml
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.prepare.instances import instances, options_of
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind, Plugin
from ascend_run.testing.oracle.known import ALIBI_FAMILIES
from ascend_run.types.config import RunConfig

from .empty_slots import values_without
from .formats.megatron_args import ALIBI, ALIBI_TYPE, LINEAR_ALIBI, POSITIONS, model_values
from .position_biases import has_unnamed_bias, plugins_with_bias

_KEPT: Final = ("data.seq_length",)
"""Settings outside of ``[model]`` that belong to a model."""
_OF_A_RUN: Final = (
    "model.hf_path",  # the folder of the initial weights, which may not exist any more
    "model.pipeline_model_parallel_layout",
    "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage",
    "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split",
)
"""Settings of ``[model]`` that do not: where a run starts, and its pipeline stages."""
_EMPTY_LAYERS: Final = "ascend_empty_layers"
_POSITIONS: Final = "model.position_embedding_type"
_OF_ALL: Final = "model.add_bias_linear"
_OF_EACH: Final = tuple(f"model.add_{kind}_bias" for kind in ("qkv", "linear_proj", "mlp"))
"""What it adds to a layer without experts."""


@attrs.frozen
class ModelConfig:
    """A model family and a resolved config."""

    family: ModelFamily
    resolved: ResolvedConfig

    @property
    def config(self) -> RunConfig:
        """The config, whose ``model.family`` is the plugin's name: several share a model_type."""
        return self.resolved.config

    @property
    def stated(self) -> frozenset[str]:
        """The fields of ``[model]`` that neither have a default nor the family's."""
        defaults = ("default", "Megatron's default", "family ")
        return frozenset(
            key.removeprefix("model.")
            for key, origin in self.resolved.origins.items()
            if key.startswith("model.") and not origin.startswith(defaults)
        )

    @property
    def toml(self) -> str:
        return render_toml(self.resolved)


def config_of_run(file: Path, family_name: str | None) -> ModelConfig:
    """Read the model's part of a run's config: ``[model]``, and the features that add a position
    bias, with their options."""
    raw = read_raw(file)
    return _of_run(raw, file, family_name, plugins_with_bias(raw.enable, file), {})


def without_empty_slots(model: ModelConfig, file: Path, family_name: str | None) -> ModelConfig:
    """Return the config of a run's model without the layer slots that its features leave empty.

    Args:
        model: The config with them, as ``config_of_run`` returns it.
    """
    raw = read_raw(file)
    features = {
        name: plugin
        for name, plugin in discover().load_each(raw.enable).classes.items()
        if _EMPTY_LAYERS in implementations(plugin)
    }
    config = _of_run(raw, file, family_name, features, {}).config
    hooks = Hooks(instances(features.values(), config))
    empty = hooks.collect(_EMPTY_LAYERS, key=str, config=config)
    if not empty:
        return model
    changes = {k: RawValue(v, str(file)) for k, v in values_without(config.model, empty).items()}
    return _of_run(raw, file, family_name, plugins_with_bias(raw.enable, file), changes)


def _of_run(
    raw: RawConfig,
    file: Path,
    family_name: str | None,
    features: Mapping[str, Plugin],
    changes: Mapping[str, RawValue],
) -> ModelConfig:
    """Resolve ``[model]`` of a run, with these features and changes."""
    name = family_name or raw.family
    family = load_family(name)
    sections = ("model.", *(f"plugins.{plugin}." for plugin in features))
    kept = {
        key: given
        for key, given in raw.values.items()
        if (key.startswith(sections) and key not in _OF_A_RUN) or key in _KEPT
    }
    if name != raw.family or "model.family" not in kept:
        kept["model.family"] = RawValue(name, "--family" if family_name else str(file))
    if features:
        kept["enable"] = RawValue([*features], str(file))
    return ModelConfig(family, _resolved({**kept, **changes}, family, features))


def config_of_hf(
    path: Path, family_name: str | None, changes: Mapping[str, object] | None = None
) -> ModelConfig:
    """Read a Hugging Face folder's ``config.json``, or such a file.

    Args:
        changes: Values of ``[model]`` that its keys do not give.
    """
    file = path / "config.json" if path.is_dir() or not path.suffix else path
    config_json = read_hf_config(path) if file != path else read_object(path, ConfigError)
    name = family_name or _known_family(config_json.get("model_type"), file)
    found = config_from_hf(load_family(name), config_json)
    return of_values(name, {**found, **(changes or {})}, str(file))


def config_of_file(path: Path, family_name: str | None) -> ModelConfig:
    """Read a run's config.toml, a Hugging Face folder, or its config.json."""
    hugging_face = path.is_dir() or path.suffix == ".json"
    return (config_of_hf if hugging_face else config_of_run)(path, family_name)


def of_values(family_name: str, values: Mapping[str, object], origin: str) -> ModelConfig:
    """Resolve a config from ``model.*``, completed by the family's defaults."""
    family = load_family(family_name)
    given = {"model.family": family_name, **values}
    return ModelConfig(
        family, _resolved({key: RawValue(v, origin) for key, v in given.items()}, family)
    )


def config_of_args(family_name: str, args: Mapping[str, Any], where: str) -> ModelConfig:
    """Read the command line that a file of Megatron stores.

    Its ``--add-bias-linear`` becomes the biases of each kind for a family that has a key for each.

    Raises:
        CheckpointError: It cannot be read, or has other positions than the family.
    """
    values = model_values(args, where)
    if problem := _position_problem(family_name, args):
        raise CheckpointError(
            f"{where} has args {problem} the run's config.toml or a Hugging Face config.json with "
            "--config"
        )
    if values.get(_POSITIONS) == ALIBI:
        values[_POSITIONS] = "none"
    if values.get(_OF_ALL) and not load_family(family_name).defaults.get(_OF_ALL):
        values |= {_OF_ALL: False, **dict.fromkeys(_OF_EACH, True)}
    return of_values(family_name, values, "its args")


def _position_problem(family: str, args: Mapping[str, Any]) -> str:
    """Return why a family cannot have the positions of the args, and what to name in their place;
    empty if it can."""
    if has_unnamed_bias(family):
        return f"which cannot say the position bias of the model family {family}; name"
    kind, alibi = args.get("position_embedding_type"), args.get(ALIBI_TYPE)
    if (kind == ALIBI) != (family in ALIBI_FAMILIES):
        has = "has" if family in ALIBI_FAMILIES else "does not have"
        return (
            f"with position_embedding_type={show(kind)}, but the model family {family} {has} "
            "ALiBi; name another family with --family, or"
        )
    if kind == ALIBI and alibi not in LINEAR_ALIBI:
        known = ", ".join(map(show, LINEAR_ALIBI))
        return (
            f"with {ALIBI_TYPE}={show(alibi)}, and model families have the ALiBi of {known} only: "
            "a slope times the distance; name"
        )
    if "position_embedding_type" in args and kind not in (*POSITIONS, ALIBI):
        known = ", ".join(POSITIONS)
        return f"with position_embedding_type={show(kind)}, and only {known} are known; name"
    return ""


def load_family(name: str) -> ModelFamily:
    """Load a model family.

    Raises:
        AscendRunError: No plugin has this name, or it is not a model family.
    """
    catalogue = discover()
    if name in catalogue and catalogue[name].kind is not Kind.MODEL:
        raise PluginResolutionError(f"'{name}' is a {catalogue[name].kind}, not a {Kind.MODEL}")
    plugin: Any = catalogue.load([name])[name]
    options = getattr(plugin, "config_class", None)
    family: ModelFamily = Hooks([plugin(options()) if options else plugin()]).require(
        "ascend_model_family"
    )
    return family


def _known_family(model_type: object, file: Path) -> str:
    """Return the family, built-in or of another package, for a Hugging Face ``model_type``.

    Raises:
        ConfigError: There is none.
    """
    known = [name for name, found in discover().items() if found.kind is Kind.MODEL]
    if model_type in known:
        return str(model_type)
    raise ConfigError(
        f"{file} has model_type {model_type!r}, which is none of the installed families: "
        f"{', '.join(known)}; name one that fits with --family, or install a plugin for it"
    )


def _resolved(
    given: Mapping[str, RawValue], family: ModelFamily, features: Mapping[str, Plugin] | None = None
) -> ResolvedConfig:
    options = {name: options_of(plugin) for name, plugin in (features or {}).items()}
    return build_config(RawConfig(values=given), options, family.defaults, (*options,))
