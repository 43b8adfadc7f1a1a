"""What a run asks of its attention kernels, held against what they declare. Imports no torch.

Asked twice: while the run is planned, of what the manifests declare, and on the ranks, before
training, of the kernels themselves, which may declare what no manifest says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import AttentionFeatures

from .latent_attention import head_widths
from .value_types import show

_OPTIONS: Final[Mapping[str, str]] = {
    "window": "window_size",
    "dropout": "attention_dropout",
    "sinks": "softmax_type",
    "softcap": "attn_logit_softcapping",
}
"""Feature -> the option of ``[model]`` that needs it wherever it is set and not neutral."""
_NEUTRAL: Final = (None, 0, "vanilla")


@attrs.frozen(kw_only=True)
class AttentionPart:
    """The kernel, or one that wraps it."""

    plugin: str
    can: AttentionFeatures | None
    """What it declares; None: nothing is known of it yet."""
    needs: AttentionFeatures = attrs.field(factory=AttentionFeatures)
    """What it asks of every part inside of it."""


def attention_problems(config: RunConfig, parts: Sequence[AttentionPart]) -> Iterator[str]:
    """A sentence for each feature that the run needs and a part does not declare.

    Args:
        parts: Innermost first.
    """
    refused: set[str] = set()  # an outer kernel can at most what the one inside it can
    for position, part in enumerate(parts):
        if part.can is None:
            continue
        needs = {
            name: (f"model.{option}={show(value)} needs", "leave the option out, or that plugin")
            for name, option, value in _set_options(config)
        }
        if config.model.get("multi_latent_attention"):
            widths = head_widths(config.model)
            if widths.key != widths.value:
                who = f"model.multi_latent_attention=true needs for keys {widths.key} wide and"
                needs["unequal_widths"] = (
                    f"{who} values {widths.value} wide",
                    "make model.v_head_dim their width, or leave that plugin out",
                )
        for outer in parts[position + 1 :]:
            for name in sorted(outer.needs.names()):
                needs.setdefault(name, (f"'{outer.plugin}' needs", "leave out one of the two"))
        for name, (who, fix) in needs.items():
            if name not in part.can.names() | refused:
                refused.add(name)
                yield (f"the attention of '{part.plugin}' does not do '{name}', which {who}; {fix}")


def needed_features(config: RunConfig, declared: Iterable[AttentionFeatures]) -> frozenset[str]:
    """Names of all that the model's options and its plugins ask of the kernel.

    Args:
        declared: ``attention_needs`` of the plugins' manifests.
    """
    of_options = {name for name, _, _ in _set_options(config)}
    return frozenset(of_options.union(*(features.names() for features in declared)))


def _set_options(config: RunConfig) -> Iterator[tuple[str, str, Any]]:
    """Feature, option and value of what is set and not neutral."""
    for name, option in _OPTIONS.items():
        if (value := config.model.get(option)) not in _NEUTRAL:
            yield name, option, value


def declared_by(kernel: Any) -> AttentionFeatures:
    """What a kernel that is built declares; one that says nothing can nothing that is special."""
    features: AttentionFeatures = getattr(kernel, "features", AttentionFeatures())
    return features
