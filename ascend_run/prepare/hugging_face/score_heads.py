"""Keys of Hugging Face's classes for sequence classification, with a score head. Torch-free."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api.contracts import ModelFamily

_KEYS = ("num_labels", "id2label", "label2id", "problem_type")


def take_labels(family: ModelFamily, remaining: dict[str, Any]) -> dict[str, Any]:
    """Take the labels of a class for sequence classification, 2 by default, as our field."""
    if remaining.get("architectures") != [family.classifier]:
        return {}
    remaining["architectures"] = [family.architecture]
    count, names, *_ = (remaining.pop(name, None) for name in _KEYS)
    return {"model.num_labels": count or len(names or ()) or 2}
