"""ALiBi: slopes of the heads, and the bias of a rank's heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.types.attention import PositionBias

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def alibi(
    heads: int,
    group: ProcessGroup,
    device: torch.device,
    *,
    max_bias: float = 8.0,
    root: bool = False,
) -> PositionBias:
    """Return the bias of this rank's heads; arguments as in ``slopes`` and PositionBias.

    Args:
        heads: Number of heads over all ranks.
        group: The tensor-parallel ranks, which hold consecutive heads.
    """
    import torch

    whole = torch.tensor(slopes(heads, max_bias), dtype=torch.float64)
    mine = whole.chunk(group.size())[group.rank()]
    return PositionBias(slopes=mine.to(device), root=root)


def slopes(heads: int, max_bias: float = 8.0) -> list[float]:
    """Return one slope per head: a geometric series that ends with ``2 ** -max_bias``.

    If the number of heads is not a power of two, the slopes are those of the next lower power of
    two, followed by every second slope of twice that power. Source: arXiv:2108.12409, section 3,
    and its code.
    """
    power = 1 << (heads.bit_length() - 1)
    series = _series(power, max_bias)
    return series + _series(2 * power, max_bias)[::2][: heads - power]


def _series(count: int, max_bias: float) -> list[float]:
    return [2.0 ** (-max_bias * (i + 1) / count) for i in range(count)]
