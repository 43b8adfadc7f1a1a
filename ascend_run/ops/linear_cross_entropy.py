"""Cross-entropy of a linear projection without holding all of its logits.

The loss is a sum, so its upstream gradient is one number: the gradients of the hidden state and of
the weight can be taken chunk by chunk in the forward, while the chunk's logits are in the cache,
and are only scaled in the backward.

Source: the chunked form of Liger Kernel, arXiv:2410.10989, section 3.2; vocabulary parallelism as
in Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

# T tokens, H hidden size, V vocabulary on this rank

CHUNK_BYTES: Final = 64 * 2**20
"""Logits held at a time. Smaller chunks make the matrix products too thin to be fast."""

BLOCK_BYTES: Final = 2 * 2**20
"""Logits widened and exponentiated at a time: what stays in a core's cache from pass to pass."""


def linear_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any = None
) -> Tensor:
    """``sum_t mask_t * (logsumexp(weight @ hidden_t) - weight[label_t] @ hidden_t)``.

    Args:
        labels_T: int64, of the whole vocabulary.
        mask_T: Weight of each token's loss; not differentiated.
        tp_group: Ranks that hold consecutive rows of the vocabulary, equally many each but for
            padding at the end; None where this rank holds all. The sum is the whole one on every
            rank, the gradient of the hidden state this rank's part of it.

    Returns:
        Scalar in float32, or float64 for float64 inputs.

    Numerics: logits in the inputs' dtype, softmax and sums in float32 (float64).
    """
    return _LinearCrossEntropy.apply(hidden_TH, weight_VH, labels_T, mask_T, tp_group)


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any = None
) -> Tensor:
    """The same from logits that are there already."""
    return _VocabCrossEntropy.apply(logits_TV, labels_T, mask_T, tp_group)


def _loss_and_logit_gradient(
    logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any
) -> Tensor:
    """The masked sum; ``logits_TV`` is overwritten by its gradient by the logits, the softmax
    minus the label's one hot, masked.

    With one rank block by block, each widened in the cache; with several all at once, so that
    there are three messages and not three a block.
    """
    wide = mask_T.dtype
    tokens, vocab = logits_TV.shape
    local_labels, is_local = _local_labels(labels_T, vocab, tp_group)
    block = tokens
    if tp_group is None:
        block = max(1, BLOCK_BYTES // (wide.itemsize * max(1, vocab)))
    loss = mask_T.new_zeros(())
    for begin in range(0, tokens, block):
        part = slice(begin, begin + block)
        scores = logits_TV[part].to(wide)
        loss += _block_loss(
            scores,
            local_labels[part],
            None if is_local is None else is_local[part],
            mask_T[part],
            tp_group,
        )
        if scores.dtype != logits_TV.dtype:
            logits_TV[part] = scores
    return loss


def _block_loss(
    scores_TV: Tensor, labels_T: Tensor, is_local_T: Tensor | None, mask_T: Tensor, tp_group: Any
) -> Tensor:
    """The sum over some tokens; the scores are overwritten by the gradient."""
    # A rank may hold nothing but padding: it has no row, and takes part all the same.
    empty = scores_TV.shape[1] == 0
    largest = (
        scores_TV.new_full((scores_TV.shape[0], 1), -torch.inf)
        if empty
        else scores_TV.amax(dim=1, keepdim=True)
    )
    _all_reduce(largest, dist.ReduceOp.MAX, tp_group)
    scores_TV.sub_(largest)
    target = (
        torch.zeros_like(mask_T) if empty else scores_TV.gather(1, labels_T.unsqueeze(1)).squeeze(1)
    )
    if is_local_T is not None:
        target.masked_fill_(~is_local_T, 0.0)
        _all_reduce(target, dist.ReduceOp.SUM, tp_group)
    total = scores_TV.exp_().sum(dim=1)
    _all_reduce(total, dist.ReduceOp.SUM, tp_group)
    scores_TV.mul_((mask_T / total).unsqueeze(1))
    one_hot = mask_T if is_local_T is None else mask_T * is_local_T
    if not empty:
        scores_TV.scatter_add_(1, labels_T.unsqueeze(1), -one_hot.unsqueeze(1))
    return ((total.log() - target) * mask_T).sum()


def _local_labels(labels_T: Tensor, num_rows: int, tp_group: Any) -> tuple[Tensor, Tensor | None]:
    """Labels counted from this rank's first row (0 where another rank holds it), and which."""
    if tp_group is None:
        return labels_T, None
    rows = torch.tensor([num_rows], device=labels_T.device)
    all_rows = [torch.empty_like(rows) for _ in range(tp_group.size())]
    dist.all_gather(all_rows, rows, group=tp_group)
    first = int(sum(all_rows[: tp_group.rank()], torch.zeros_like(rows)))
    shifted = labels_T - first
    is_local = (shifted >= 0) & (shifted < num_rows)
    return shifted.masked_fill(~is_local, 0), is_local


def _all_reduce(x: Tensor, operation: Any, group: Any) -> None:
    if group is not None:
        dist.all_reduce(x, op=operation, group=group)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


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
        wide = _wide(hidden_TH.dtype)
        mask_T = mask_T.to(wide)
        tokens, vocab = hidden_TH.shape[0], weight_VH.shape[0]
        chunk = max(1, CHUNK_BYTES // (hidden_TH.itemsize * max(1, vocab)))
        loss = hidden_TH.new_zeros((), dtype=wide)
        dhidden = torch.empty_like(hidden_TH) if wants_hidden else None
        dweight = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        for begin in range(0, tokens, chunk):
            part = slice(begin, begin + chunk)
            dlogits = hidden_TH[part] @ weight_VH.t()
            loss += _loss_and_logit_gradient(dlogits, labels_T[part], mask_T[part], tp_group)
            if dhidden is not None:
                torch.mm(dlogits, weight_VH, out=dhidden[part])
            if dweight is not None:
                _add_product(dweight, dlogits, hidden_TH[part])
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight_VH.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = dhidden * dloss.to(dhidden.dtype)
        if dweight is not None:
            dweight = (dweight * dloss).to(ctx.weight_dtype)
        return dhidden, dweight, None, None, None


def _add_product(total_VH: Tensor, dlogits_TV: Tensor, hidden_TH: Tensor) -> None:
    """``total += dlogits.T @ hidden``; in one call where the dtypes are one."""
    if total_VH.dtype == dlogits_TV.dtype:
        total_VH.addmm_(dlogits_TV.t(), hidden_TH)
    else:
        total_VH.add_(dlogits_TV.t() @ hidden_TH)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: Any
    ) -> Tensor:
        dlogits = logits_TV.clone()
        mask_T = mask_T.to(_wide(logits_TV.dtype))
        loss = _loss_and_logit_gradient(dlogits, labels_T, mask_T, tp_group)
        ctx.save_for_backward(dlogits)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return dlogits * dloss.to(dlogits.dtype), None, None, None
