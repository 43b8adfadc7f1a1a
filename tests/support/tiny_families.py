"""A tiny model of each model family of the package."""

from __future__ import annotations

from typing import Any, Final

from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.testing.hugging_face.variants import sizes
from ascend_run.tools.convert.model_config import load_family
from tests.support.small_runs import prepare

FAMILIES: Final = tuple(
    name for name, found in discover().items() if found.kind is Kind.MODEL and found.first_party
)
"""Names of their plugins."""
_RUN: Final = {
    "data.seq_length": 16,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 4,
    "train.precision": "fp32",
    "model.make_vocab_size_divisible_by": 1,
}


def model_values(name: str) -> dict[str, Any]:
    """Return the ``[model]`` values of a tiny model, by full key."""
    family = load_family(name)
    identity = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {"model.family": name, **config_from_hf(family, {**identity, **sizes(family)})}


def tiny_run(name: str, enable: tuple[str, ...] = (), **more: object) -> PreparedRun:
    """Prepare a run of a tiny model on one rank.

    Args:
        more: Further values, by full key.
    """
    return prepare({**_RUN, **model_values(name), **more}, enable)
