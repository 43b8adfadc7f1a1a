"""The softmax over a vocabulary of which each rank holds some rows, and how many logits to hold.

Source: vocabulary parallelism as in Megatron-LM, arXiv:1909.08053, section 3.
"""

# T tokens, C tokens of a chunk, V vocabulary on this rank

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES: Final = 64 * 2**20
"""Logits held at a time. Larger chunks accumulate the weight's gradient less often."""
ROW_BYTES: Final = 2 * 2**20
"""Logits per softmax call, in float32: what fits in a core's caches."""
DEVICE_CHUNK_BYTES: Final = 256 * 2**20
DEVICE_ROW_BYTES: Final = 128 * 2**20
"""The same on a device, which small kernels leave idle while the host launches the next."""


class ShardLabels:
    """The labels of all tokens, relative to this rank's first row of the vocabulary.

    Args:
        labels_T: int64, indices into the full vocabulary.
        num_rows: Rows of the vocabulary on this rank, possibly none.
        tp_group: Ranks that hold consecutive rows of the vocabulary; None if this rank holds all.
    """

    def __init__(self, labels_T: Tensor, num_rows: int, tp_group: dist.ProcessGroup | None) -> None:
        self.group = tp_group
        self.index_T1 = labels_T.unsqueeze(1)
        self.is_local_T1: Tensor | None = None
        self.max_rows = num_rows
        """Maximum over ranks: determines the chunks that all ranks must process together."""
        if tp_group is not None:
            rows = self.index_T1.new_tensor([num_rows])
            rows_of_ranks = _rows_of_ranks(rows, tp_group)
            self.max_rows = max(rows_of_ranks)
            shifted = self.index_T1 - sum(rows_of_ranks[: tp_group.rank()])
            self.is_local_T1 = (shifted >= 0) & (shifted < num_rows)
            self.index_T1 = shifted.masked_fill(~self.is_local_T1, 0)

    def logits_of(self, logits_CV: Tensor, rows: slice) -> Tensor:
        """Return each label's logit [C, 1], 0 for a label of another rank.

        Args:
            rows: Slice of these tokens.
        """
        if not logits_CV.shape[1]:  # only padding on this rank
            return logits_CV.new_zeros((logits_CV.shape[0], 1))
        target = logits_CV.gather(1, self.index_T1[rows])
        if self.is_local_T1 is None:
            return target
        return target * self.is_local_T1[rows].to(logits_CV.dtype)

    def subtract_one_hot(self, softmax_CV: Tensor, rows: slice) -> None:
        """Subtract 1 at each label's column, in place."""
        if not softmax_CV.shape[1]:
            return
        index_C1 = self.index_T1[rows]
        if self.is_local_T1 is None:
            minus = torch.full_like(index_C1, -1, dtype=softmax_CV.dtype)
        else:
            minus = -self.is_local_T1[rows].to(softmax_CV.dtype)
        softmax_CV.scatter_add_(1, index_C1, minus)


def softmax_(logits_CV: Tensor) -> Tensor:
    """Overwrite logits with their softmax; return the logarithm of the sum of exponentials [C, 1].

    Args:
        logits_CV: In float32 or float64.
    """
    # The largest probability is at least 1/V, so its logarithm is accurate.
    largest = logits_CV.amax(1, keepdim=True)
    torch.softmax(logits_CV, 1, out=logits_CV)
    return largest - logits_CV.amax(1, keepdim=True).log()


def chunk_rows(like: Tensor, num_columns: int, chunk_bytes: int | None) -> int:
    """Return the tokens of a chunk: how many rows of logits in this dtype fit, at least one.

    Args:
        chunk_bytes: None is ``CHUNK_BYTES``, on a device ``DEVICE_CHUNK_BYTES``.
    """
    limits = chunk_bytes or CHUNK_BYTES, chunk_bytes or DEVICE_CHUNK_BYTES
    return _rows(like, *limits, like.dtype, num_columns)


def block_rows(like: Tensor, num_columns: int, dtype: torch.dtype) -> int:
    """Return how many rows in ``dtype`` to compute at a time, at least one."""
    return _rows(like, ROW_BYTES, DEVICE_ROW_BYTES, dtype, num_columns)


def loss_dtypes(like: Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the inputs' dtype, the dtype of sums, and that of gradients of logits.

    Most entries of softmax minus one-hot underflow in fp16 without a loss scale, and with one their
    products may overflow before they are summed, so those stay in float32.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    return like.dtype, wide, wide if like.dtype == torch.float16 else like.dtype


def _rows(
    like: Tensor, on_processor: int, on_device: int, dtype: torch.dtype, num_columns: int
) -> int:
    num_bytes = on_processor if like.device.type == "cpu" else on_device
    return max(1, num_bytes // (dtype.itemsize * max(1, num_columns)))


def _rows_of_ranks(rows: Tensor, group: dist.ProcessGroup) -> list[int]:
    all_rows = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(all_rows, rows, group=group)
    return [int(r) for r in all_rows]
