"""Cross-entropy of a linear projection without holding all of its logits.

The loss is a sum, so its upstream gradient is one number: the gradients of the hidden state and of
the weight can be taken chunk by chunk in the forward, where the chunk's logits are at hand, and
are only scaled in the backward.

Source: the chunked form of Liger Kernel, arXiv:2410.10989, section 3.2; vocabulary parallelism as
in Megatron-LM, arXiv:1909.08053, section 3.
"""

# T tokens, C tokens of a chunk, H hidden size, V vocabulary on this rank

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES: Final = 64 * 2**20
"""Logits held at a time. Larger chunks add up the weight's gradient less often."""
ROW_BYTES: Final = 2 * 2**20
"""Logits whose softmax is taken at a time, in float32: what a core's caches keep."""


def linear_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any = None
) -> Tensor:
    """``sum_t mask_t * (logsumexp(weight @ hidden_t) - weight[label_t] @ hidden_t)``.

    Args:
        labels_T: int64, of the whole vocabulary.
        mask_T: Weight of each token's loss; not differentiated.
        tp_group: Ranks that hold consecutive rows of the vocabulary, some perhaps none (a
            vocabulary ends before its padding does); None where this rank holds all. The sum is
            the whole one on every rank, the gradient of the hidden state this rank's part of it,
            which the caller adds up over the ranks.

    Returns:
        Scalar in float32, or float64 for float64 inputs.

    Numerics: logits in the inputs' dtype, softmax and sums in float32 (float64). Gradients by
    products in the inputs' dtype, in fp16 in float32: a loss scale comes after them.
    """
    if not torch.is_grad_enabled():  # inside, autograd would still say that it wants gradients
        hidden_TH, weight_VH = hidden_TH.detach(), weight_VH.detach()
    return _LinearCrossEntropy.apply(hidden_TH, weight_VH, labels_T, mask_T, tp_group)


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any = None
) -> Tensor:
    """The same from logits that are there already; their gradient is in their dtype."""
    return _VocabCrossEntropy.apply(logits_TV, labels_T, mask_T, tp_group)


class _Labels:
    """The labels of all tokens, counted from this rank's first row of the vocabulary."""

    def __init__(self, labels_T: Tensor, num_rows: int, tp_group: Any) -> None:
        self.group = tp_group
        self.index_T1 = labels_T.unsqueeze(1)
        self.is_local_T1: Tensor | None = None
        self.most_rows = num_rows
        """Of any rank: what decides on chunks, which the ranks take in step."""
        if tp_group is not None:
            rows_of_ranks = self._rows_of_ranks(num_rows)
            self.most_rows = max(rows_of_ranks)
            shifted = self.index_T1 - sum(rows_of_ranks[: tp_group.rank()])
            self.is_local_T1 = (shifted >= 0) & (shifted < num_rows)
            self.index_T1 = shifted.masked_fill(~self.is_local_T1, 0)

    def _rows_of_ranks(self, num_rows: int) -> list[int]:
        rows = self.index_T1.new_tensor([num_rows])
        all_rows = [torch.empty_like(rows) for _ in range(self.group.size())]
        dist.all_gather(all_rows, rows, group=self.group)
        return [int(r) for r in all_rows]

    def losses_and_gradient(self, logits_CV: Tensor, rows: slice) -> Tensor:
        """The loss of each token [C]; ``logits_CV`` becomes softmax minus the label's one hot.

        Args:
            logits_CV: In float32 or float64; overwritten.
            rows: Which tokens these are.
        """
        if self.is_local_T1 is not None:
            return self._over_ranks(logits_CV, self.index_T1[rows], self.is_local_T1[rows])
        index = self.index_T1[rows]
        target = logits_CV.gather(1, index)
        # The largest probability is at least 1/V, so its logarithm loses nothing.
        largest = logits_CV.amax(1, keepdim=True)
        torch.softmax(logits_CV, 1, out=logits_CV)
        log_total = largest - logits_CV.amax(1, keepdim=True).log()
        logits_CV.scatter_add_(1, index, torch.full_like(target, -1.0))
        return (log_total - target).squeeze(1)

    def _over_ranks(self, logits_CV: Tensor, index_C1: Tensor, is_local_C1: Tensor) -> Tensor:
        one_hot = is_local_C1.to(logits_CV.dtype)
        if logits_CV.shape[1]:
            target = logits_CV.gather(1, index_C1) * one_hot
            largest = logits_CV.amax(1, keepdim=True)
        else:  # nothing but padding here: it takes part all the same
            target, largest = one_hot, torch.full_like(one_hot, -torch.inf)
        dist.all_reduce(target, group=self.group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        total = logits_CV.sub_(largest).exp_().sum(1, keepdim=True)
        dist.all_reduce(total, group=self.group)
        logits_CV.div_(total)
        if logits_CV.shape[1]:
            logits_CV.scatter_add_(1, index_C1, -is_local_C1.to(logits_CV.dtype))
        return (total.log_() + largest - target).squeeze(1)

    def sum_and_gradient(self, logits_CV: Tensor, start: int, mask_T: Tensor) -> Tensor:
        """The masked sum over a chunk; its logits become their gradient, not yet masked.

        Args:
            logits_CV: In any dtype; overwritten.
            start: Token that the chunk begins with.
            mask_T: Of all tokens, in float32 or float64.
        """
        wide, num_tokens = mask_T.dtype, logits_CV.shape[0]
        size = num_tokens  # ranks meet once a chunk
        if self.group is None:
            size = max(1, ROW_BYTES // (wide.itemsize * logits_CV.shape[1]))
        total = mask_T.new_zeros(())
        for begin in range(0, num_tokens, size):
            part = logits_CV[begin : begin + size]
            rows = slice(start + begin, start + begin + part.shape[0])
            logits = part.to(wide)
            total += torch.dot(self.losses_and_gradient(logits, rows), mask_T[rows])
            if logits is not part:
                part.copy_(logits)
        return total


def _dtypes(like: Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The inputs' own dtype, that of sums, and that of gradients until they are scaled.

    Most entries of softmax minus one hot are below what fp16 can tell from zero, which loss
    scaling is there for; the scale is known in backward only, so until then they stay wide.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    return like.dtype, wide, wide if like.dtype == torch.float16 else like.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        tp_group: Any,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtype, wide, kept = _dtypes(hidden_TH)
        mask_T = mask_T.to(wide)
        num_tokens, num_rows = hidden_TH.shape[0], weight_VH.shape[0]
        labels = _Labels(labels_T, num_rows, tp_group)
        size = max(1, CHUNK_BYTES // (dtype.itemsize * labels.most_rows))
        buffer_CV = hidden_TH.new_empty((min(size, num_tokens), num_rows))
        loss = mask_T.new_zeros(())
        factor_VH = weight_VH.to(kept) if wants_hidden else None
        dhidden = torch.empty_like(hidden_TH, dtype=kept) if wants_hidden else None
        dweight: Tensor | None = None
        # One product needs no sum: it is the gradient, in the weight's dtype.
        sum_dtype = wide if num_tokens > size else kept
        for start in range(0, num_tokens, size):
            rows = slice(start, min(start + size, num_tokens))
            hidden_CH, mask_C1 = hidden_TH[rows], mask_T[rows].unsqueeze(1)
            logits = buffer_CV[: hidden_CH.shape[0]]
            torch.mm(hidden_CH, weight_VH.t(), out=logits)
            dlogits = logits.to(kept)
            loss += labels.sum_and_gradient(dlogits, start, mask_T)
            # The mask goes to the narrow side of each product.
            mask_C1 = mask_C1.to(kept)
            if dhidden is not None:
                torch.mul(torch.mm(dlogits, factor_VH), mask_C1, out=dhidden[rows])
            if wants_weight:
                masked = hidden_CH.to(kept) * mask_C1
                dweight = _plus_product(dweight, dlogits, masked, sum_dtype)
        if wants_weight and dweight is None:  # not one token
            dweight = torch.zeros_like(weight_VH)
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = dtype, weight_VH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = _scaled(dhidden, dloss, ctx.dtypes[0])
        if dweight is not None:
            dweight = _scaled(dweight, dloss, ctx.dtypes[1])
        return dhidden, dweight, None, None, None


def _plus_product(
    total_VH: Tensor | None, dlogits_CV: Tensor, hidden_CH: Tensor, dtype: torch.dtype
) -> Tensor:
    """``total + dlogits.T @ hidden``, in place where there is a total; else in ``dtype``."""
    if total_VH is None:
        return (dlogits_CV.t() @ hidden_CH).to(dtype)
    if total_VH.dtype == dlogits_CV.dtype:
        return total_VH.addmm_(dlogits_CV.t(), hidden_CH)
    return total_VH.add_(dlogits_CV.t() @ hidden_CH)


def _scaled(gradient: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * dloss``; without a pass where that is 1, and asking costs nothing."""
    if dloss.device.type == "cpu" and dloss == 1:
        return gradient.to(dtype)
    return (gradient * dloss).to(dtype)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any
    ) -> Tensor:
        ctx.dtype, wide, kept = _dtypes(logits_TV)
        mask_T = mask_T.to(wide)
        labels = _Labels(labels_T, logits_TV.shape[1], tp_group)
        dlogits = logits_TV.to(kept, copy=True, memory_format=torch.contiguous_format)
        loss = labels.sum_and_gradient(dlogits, 0, mask_T)
        ctx.save_for_backward(dlogits, mask_T)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dlogits, mask_T = ctx.saved_tensors
        scale_T1 = (mask_T * dloss).unsqueeze(1).to(dlogits.dtype)
        return (dlogits * scale_T1).to(ctx.dtype), None, None, None
