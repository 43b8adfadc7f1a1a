"""The values of a plan's config, with where each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ascend_run.prepare.config.loading import ResolvedConfig
from ascend_run.prepare.config.schema import DEFAULT_ORIGINS
from ascend_run.types.config import RunConfig


def chosen_values(
    resolved: ResolvedConfig, *, everything: bool = False
) -> Iterator[tuple[str, object, str]]:
    """Yield (key, value, origin) of every value that was set, or of all values.

    Megatron's fields that cannot be set have a default but no value.
    """
    for key, origin in resolved.origins.items():
        if everything or origin not in DEFAULT_ORIGINS:
            value = _value(resolved.config, key)
            if value is not attrs.NOTHING:
                yield key, value, origin


def _value(config: RunConfig, key: str) -> Any:
    found = config
    for part in key.split(".", 2):  # plugins.swap-attention.min_bytes
        if isinstance(found, Mapping):
            found = found.get(part, attrs.NOTHING)
        else:
            found = getattr(found, part)
    return found
