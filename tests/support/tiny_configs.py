"""Small configs for tests."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import ConfigError, RunConfig
from ascend_run.prepare.config.loading import ResolvedConfig, build_config, read_raw
from ascend_run.types.config import FieldSection

SMALLEST = """
[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
vocab_size = 100
"""


@attrs.frozen(kw_only=True)
class SwapOptions:
    """Options as a plugin declares them, of every common type."""

    min_bytes: int = attrs.field(default=1024, validator=attrs.validators.ge(0))
    ratio: float = 0.5
    layers: tuple[int, ...] = ()
    mode: str = attrs.field(default="sync", validator=attrs.validators.in_(("sync", "async")))
    folder: str | None = "swap"
    verbose: bool = False


OPTION_CLASSES: Mapping[str, type | None] = {"swap": SwapOptions, "cpu": None}


def build(
    file: Path | None, *overrides: str, family: Mapping[str, Any] | None = None, **given: Any
) -> ResolvedConfig:
    """Build the config of one file and its overrides, with the plugins ``swap`` and ``cpu``
    active."""
    raw = read_raw(file, overrides)
    return build_config(raw, OPTION_CLASSES, family or {}, ("swap",), **given)


def model_fields(values: Mapping[str, object] | None = None) -> FieldSection:
    """Return the smallest ``[model]`` without a vocabulary size, with values set."""
    return FieldSection({**_smallest().model, "vocab_size": None, **(values or {})})


def parallel_fields(values: Mapping[str, object] | None = None) -> FieldSection:
    """Return the default ``[parallel]``, with values set."""
    return FieldSection({**_smallest().parallel, **(values or {})})


@functools.cache
def _smallest() -> RunConfig:
    return config_with()


def problems_of(file: Path | None, *overrides: str, **given: Any) -> list[str]:
    """Return the error message for an invalid config."""
    with pytest.raises(ConfigError) as refused:
        build(file, *overrides, **given)
    return list(refused.value.problems)


def config_with(**values: Any) -> RunConfig:
    """Return the smallest config with values set: ``model__num_layers=4``."""
    overrides = [f"{key.replace('__', '.', 1)}={_text(value)}" for key, value in values.items()]
    smallest = [line.replace(" ", "") for line in SMALLEST.split("\n") if "=" in line]
    return build(None, *(f"model.{line}" for line in smallest), *overrides).config


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
