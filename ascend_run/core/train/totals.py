"""Loss and metrics of global batches, summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError

_LOSS: tuple[str, ...] = ("loss", "count", "tokens")


@attrs.frozen
class LossTotals:
    """Sums over all ranks of one global batch, or of several."""

    values: tuple[float, ...]
    """Loss, count and tokens; then sum and count of each metric."""
    names: tuple[str, ...]
    """Of the metrics."""

    @classmethod
    def from_tensor(cls, total: Tensor, names: Sequence[str]) -> Self:
        """Read what ``report_of`` returned, summed over ranks and micro-batches."""
        return cls(tuple(total.tolist()), tuple(names))

    def __add__(self, other: LossTotals) -> LossTotals:
        pairs = zip(self.values, other.values, strict=True)
        return attrs.evolve(self, values=tuple(one + two for one, two in pairs))

    @property
    def loss(self) -> float:
        """The mean over all tokens (or samples)."""
        return self.values[0] / max(self.values[1], 1.0)

    @property
    def count(self) -> int:
        """Tokens (or samples) in the mean."""
        return int(self.values[1])

    @property
    def num_tokens(self) -> int:
        """Tokens that were trained on."""
        return int(self.values[2])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The mean of each metric that was counted."""
        pairs = self.values[len(_LOSS) :]
        sums = zip(self.names, pairs[::2], pairs[1::2], strict=True)
        return {name: total / count for name, total, count in sums if count}


def report_size(names: Sequence[str]) -> int:
    """Return the length of what ``report_of`` returns."""
    return len(_LOSS) + 2 * len(names)


def report_of(loss: c.LossSum, names: Sequence[str]) -> Tensor:
    """Return the sums of a micro-batch on this rank, [report_size], float64.

    Raises:
        HookError: The task has other metrics than it declares.
    """
    if {*loss.metrics} != {*names}:
        raise HookError(
            f"ascend_task: a loss came with the metrics {', '.join(sorted(loss.metrics)) or 'none'}"
            f", and the task declares {', '.join(sorted(names)) or 'none'}"
        )
    tokens = loss.count if loss.tokens is None else loss.tokens
    metrics = [value for name in names for value in loss.metrics[name]]
    values = (loss.sum, loss.count, tokens, *metrics)
    return torch.stack([value.detach().double() for value in values])
