"""Compare what a run needs of its attention kernels with what they declare. Imports no torch.

Called twice: by planning, with what the manifests declare, and on the ranks before training, with
what the kernels themselves declare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.plugin_api.contracts import AttentionFeatures, AttentionKernel
from ascend_run.plugin_api.error_text import show
from ascend_run.types.config import RunConfig

from .latent_attention import head_widths

_OPTIONS: Final[Mapping[str, str]] = {
    "window": "window_size",
    "dropout": "attention_dropout",
    "sinks": "softmax_type",
    "softcap": "attn_logit_softcapping",
}
"""Maps a feature to the ``[model]`` option that needs it unless it is unset or neutral."""
_NEUTRAL: Final = (None, 0, "vanilla")


@attrs.frozen(kw_only=True)
class AttentionPart:
    """An attention kernel, or a wrapper of one."""

    plugin: str
    can: AttentionFeatures | None  #: Features that it declares; None if unknown.
    needs: AttentionFeatures = attrs.field(factory=AttentionFeatures)
    """Features that it needs of every kernel or wrapper inside it."""


def attention_problems(config: RunConfig, parts: Sequence[AttentionPart]) -> Iterator[str]:
    """Yield a message for each feature that the run needs and a kernel or wrapper does not declare.

    Args:
        parts: Innermost first.
    """
    refused: set[str] = set()  # an outer kernel supports at most what the inner one supports
    for position, part in enumerate(parts):
        if part.can is None:
            continue
        needs = {
            name: (f"model.{option}={show(value)} needs", "leave the option out, or that plugin")
            for name, option, value in _set_options(config)
        }
        if config.model.multi_latent_attention:
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
    """Return the names of all features that options and plugins need of the kernel.

    Args:
        declared: ``attention_needs`` of the plugins' manifests.
    """
    of_options = {name for name, _, _ in _set_options(config)}
    return frozenset(of_options.union(*(features.names() for features in declared)))


def _set_options(config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Yield (feature, option, value) of options that are set and not neutral."""
    for name, option in _OPTIONS.items():
        if (value := config.model[option]) not in _NEUTRAL:
            yield name, option, value


def declared_by(kernel: AttentionKernel) -> AttentionFeatures:
    """Return the features that a kernel declares; by default, none."""
    features: AttentionFeatures = getattr(kernel, "features", AttentionFeatures())
    return features
