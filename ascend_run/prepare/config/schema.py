"""All options of a run: type, default and origin of the default."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.core.config.megatron_fields import MegatronField, megatron_fields
from ascend_run.plugin_api.errors import PluginLoadError
from ascend_run.types.config import RunConfig

from .model_keys import ModelKeys
from .unsupported import OWN_DEFAULTS

TOP_LEVEL: Final[Mapping[str, object]] = {
    "enable": tuple[str, ...],
    "platform": str,
    "task": str,
}
SECTION_CLASSES: Final[Mapping[str, type]] = {
    attribute.name: section_class
    for attribute in attrs.fields(RunConfig)
    if attrs.has(section_class := getattr(attribute.default, "factory", type(None)))
}
"""Maps a section such as ``run``, ``data`` or ``train`` to its attrs class."""
DEFAULT_ORIGINS: Final = ("default", "plugin default", "Megatron's default")
"""Origins of values that nothing has set."""
SECTIONS: Final = tuple(name for name in attrs.fields_dict(RunConfig) if name not in TOP_LEVEL)


@attrs.frozen(kw_only=True)
class Option:
    """One key of the config."""

    key: str
    """Full key, such as ``model.num_layers`` or ``plugins.swap-attention.min_bytes``."""
    type: Any
    default: Any
    """``attrs.NOTHING`` if the option is required."""
    origin: str
    """Origin of the default."""
    megatron: MegatronField | None = None

    @property
    def name(self) -> str:
        """The part after the last dot."""
        return self.key.rpartition(".")[2]

    @property
    def section(self) -> str:
        """The part before the last dot."""
        return self.key.rpartition(".")[0]


def all_options(option_classes: Mapping[str, type | None]) -> dict[str, Option]:
    """Return all options by key, in the order of a config file.

    Args:
        option_classes: Maps each plugin name to its attrs class of options, or None.

    Raises:
        PluginLoadError: Options cannot be read from a plugin's class.
    """
    options: list[Option] = []
    for section in SECTIONS[:-1]:
        if section in SECTION_CLASSES:
            options += class_options(section, SECTION_CLASSES[section], "default")
            continue
        if section == "model":
            options += class_options("model", ModelKeys, "default")
        options += [
            Option(
                key=f"{section}.{field.name}",
                type=field.type,
                default=OWN_DEFAULTS.get(field.name, copy.copy(field.default)),
                origin="default" if field.name in OWN_DEFAULTS else "Megatron's default",
                megatron=field,
            )
            for field in megatron_fields().values()
            if field.section == section
        ]
    for plugin, options_class in option_classes.items():
        if options_class is not None:
            options += class_options(f"plugins.{plugin}", options_class, "plugin default")
    return {option.key: option for option in options}


def class_options(prefix: str, options_class: type, origin: str) -> list[Option]:
    """Return the fields of an attrs class as options.

    Raises:
        PluginLoadError: The class is not an attrs class, or uses a type that does not exist at run
            time.
    """
    try:
        attributes = attrs.fields(attrs.resolve_types(options_class))
    except (attrs.exceptions.NotAnAttrsClassError, NameError, TypeError) as error:
        raise PluginLoadError(
            f"{prefix}: cannot read options from {options_class!r}: {error}"
        ) from None
    return [
        Option(
            key=f"{prefix}.{attribute.name}",
            type=attribute.type if attribute.type is not None else Any,
            default=_default(attribute),
            origin=origin,
        )
        for attribute in attributes
        if attribute.init
    ]


def _default(attribute: attrs.Attribute[Any]) -> Any:
    default: Any = attribute.default
    factory = getattr(default, "factory", None)  # set by attrs.field(factory=...)
    if factory is None:
        return default
    return None if default.takes_self else factory()
