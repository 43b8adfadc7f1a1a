"""A tiny model of each model family of the package."""

from __future__ import annotations

from typing import Any, Final

from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.testing.hugging_face.variants import sizes
from ascend_run.tools.convert.model_config import load_family

FAMILIES: Final = tuple(
    name for name, found in discover().items() if found.kind is Kind.MODEL and found.first_party
)
"""Names of their plugins."""


def model_values(name: str) -> dict[str, Any]:
    """Return the ``[model]`` values of a tiny model, by full key."""
    family = load_family(name)
    identity = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {"model.family": name, **config_from_hf(family, {**identity, **sizes(family)})}
