"""The datasets of a blend: what was asked of each, and what the run has read of it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_run.plugin_api.errors import PlatformError
from ascend_run.tools.pages.markup import Markup, element, join, table
from ascend_run.tools.pages.run_folder import RunData


@attrs.frozen(kw_only=True)
class BlendedDataset:
    """A dataset of ``data.train``; None if the run folder does not tell."""

    name: str
    weight: float
    """As in ``data.train_weights``; its tokens if there are no weights."""
    share: float
    """Fraction of the samples that the weight asks for."""
    samples: int | None
    """Read so far."""
    samples_share: float | None
    """Fraction of the samples read so far."""
    tokens: int | None
    """Length of the samples read so far, with padding."""
    epochs: float | None
    left_out: tuple[str, ...]
    """Why conversations were left out, one sentence a reason."""

    def sentence(self) -> str:
        """Return the row as text."""
        parts = [f"{self.name}: weight {self.weight:g}, {100 * self.share:.2f} % asked"]
        if self.samples is not None and self.samples_share is not None:
            read = f"{self.samples:,} samples" + _tokens(self.tokens)
            parts.append(f"{100 * self.samples_share:.2f} % read ({read})")
        if self.epochs is not None:
            parts.append(f"{self.epochs:.2f} epochs")
        return "; ".join([", ".join(parts), *(f"left out, {why}" for why in self.left_out)])


def blend_of(run: RunData, consumed_samples: int | None) -> tuple[BlendedDataset, ...]:
    """Count the samples of each dataset by the order of the blend; empty without a blend.

    Args:
        consumed_samples: Samples that the run has trained on; None: not known.
    """
    names = run.config.data.train
    logged = {found.files[0]: found for found in run.datasets if len(found.files) == 1}
    weights = run.config.data.train_weights or tuple(
        float(logged[name].tokens or 0) for name in names if name in logged
    )
    if len(names) < 2 or len(weights) != len(names) or not all(weight > 0 for weight in weights):
        return ()
    counts = _counts(weights, consumed_samples)
    length = run.config.data.seq_length
    rows = []
    for name, weight, count in zip(names, weights, counts, strict=True):
        found = logged.get(name)
        size = found.samples if found is not None else None
        rows.append(
            BlendedDataset(
                name=name,
                weight=weight,
                share=weight / sum(weights),
                samples=count,
                samples_share=count / consumed_samples
                if count is not None and consumed_samples
                else None,
                tokens=count * length if count is not None and length is not None else None,
                epochs=count / size if count is not None and size else None,
                left_out=found.left_out if found is not None else (),
            )
        )
    return tuple(rows)


def _counts(weights: Sequence[float], samples: int | None) -> Sequence[int | None]:
    """Return the number of samples of each dataset among the first of the blend."""
    unknown = [None] * len(weights)
    if samples is None:
        return unknown
    if samples == 0:
        return [0] * len(weights)
    import numpy as np

    from ascend_run.core.data.samples import interleave  # imports Megatron: only for a blend

    try:
        order = interleave((np.asarray(weights) / np.sum(weights)).tolist(), samples)
    except PlatformError:
        return unknown
    counts: list[int | None] = np.bincount(order["source"], minlength=len(weights)).tolist()
    return counts


def blend_section(blend: Sequence[BlendedDataset]) -> Markup:
    """Return a table with one row per dataset."""
    head = ("dataset", "weight", "share asked", "share read", "samples", "tokens", "epochs")
    rows = [
        [
            element("code", each.name),
            f"{each.weight:g}",
            f"{100 * each.share:.2f} %",
            "" if each.samples_share is None else f"{100 * each.samples_share:.2f} %",
            "" if each.samples is None else f"{each.samples:,}",
            "" if each.tokens is None else f"{each.tokens:,}",
            "" if each.epochs is None else f"{each.epochs:.2f}",
        ]
        for each in blend
    ]
    drops = [
        element("li", element("code", each.name), f": {why}")
        for each in blend
        for why in each.left_out
    ]
    left_out = [element("p", "Left out:"), element("ul", *drops)] if drops else []
    note = "Read: up to the last logged step. Tokens include padding."
    return join([table(head, rows), element("p", note, class_="note"), *left_out])


def _tokens(count: int | None) -> str:
    return "" if count is None else f", {count:,} tokens"
