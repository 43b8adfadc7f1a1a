"""Cross-entropy of a linear projection without materialising all logits.

The loss is a sum, so its upstream gradient is one number: forward computes the gradients of the
hidden state and of the weight chunk by chunk, while a chunk's logits exist, and backward only
scales them.

Source: the chunked variant of Liger Kernel, arXiv:2410.10989, section 3.2; vocabulary parallelism
as in Megatron-LM, arXiv:1909.08053, section 3.
"""

# T tokens, C tokens of a chunk, H hidden size, V vocabulary on this rank

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function

from .vocabulary_shard import ShardLabels, block_rows, chunk_rows, loss_dtypes, softmax_
from .weight_gradient import plus_product
from .wide_matmul import Matmul


def linear_cross_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    mask_T: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    matmul: Matmul = torch.mm,
    softcap: float | None = None,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Compute ``sum_t mask_t * (logsumexp(weight @ hidden_t) - weight[label_t] @ hidden_t)``.

    Args:
        labels_T: int64, indices into the full vocabulary.
        mask_T: Weight of each token's loss; not differentiated.
        tp_group: Ranks that hold consecutive rows of the vocabulary, possibly none (a vocabulary
            ends before its padding does); None if this rank holds all. Every rank returns the full
            sum; the gradient of the hidden state is this rank's contribution, which the caller
            reduces.
        matmul: Multiplies two matrices.
        softcap: c of ``c * tanh(logit / c)``, taken of every logit; None for the logits themselves.
        bias_V: Added to each token's logits.
        chunk_bytes: Logits held at a time, at least those of one token; None is the default of
            ``chunk_rows``.

    Returns:
        Scalar in float32, or float64 for float64 inputs.

    Numerics: logits in the inputs' dtype, softmax and sums in float32 (float64). Gradients by
    matmuls in the inputs' dtype; in float32 for fp16, since a loss scale is applied later.
    """
    if not torch.is_grad_enabled():  # within forward, needs_input_grad would still be true
        hidden_TH, weight_VH = hidden_TH.detach(), weight_VH.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    out: Tensor = _LinearCrossEntropy.apply(
        hidden_TH, weight_VH, bias_V, labels_T, mask_T, tp_group, matmul, softcap, chunk_bytes
    )
    return out


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, tp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Compute the same from existing logits; their gradient is in their dtype."""
    out: Tensor = _VocabCrossEntropy.apply(logits_TV, labels_T, mask_T, tp_group)
    return out


class _Labels(ShardLabels):
    def losses_and_gradient(self, logits_CV: Tensor, rows: slice) -> Tensor:
        """Return the loss of each token [C]; overwrite ``logits_CV`` with softmax minus one-hot
        labels.

        Args:
            logits_CV: In float32 or float64; overwritten.
            rows: Slice of these tokens.
        """
        if self.group is not None:
            return self._over_ranks(logits_CV, rows)
        target = self.logits_of(logits_CV, rows)
        log_total = softmax_(logits_CV)
        self.subtract_one_hot(logits_CV, rows)
        return (log_total - target).squeeze(1)

    def _over_ranks(self, logits_CV: Tensor, rows: slice) -> Tensor:
        target = self.logits_of(logits_CV, rows)
        if logits_CV.shape[1]:
            largest = logits_CV.amax(1, keepdim=True)
        else:  # only padding on this rank: it still takes part in the collectives
            largest = torch.full_like(target, -torch.inf)
        dist.all_reduce(target, group=self.group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        total = logits_CV.sub_(largest).exp_().sum(1, keepdim=True)
        dist.all_reduce(total, group=self.group)
        logits_CV.div_(total)
        self.subtract_one_hot(logits_CV, rows)
        return (total.log_() + largest - target).squeeze(1)

    def sum_and_gradient(self, logits_CV: Tensor, start: int, mask_T: Tensor) -> Tensor:
        """Return the masked sum over a chunk; overwrite its logits with their gradient, not yet
        masked.

        Args:
            logits_CV: In any dtype; overwritten.
            start: First token of the chunk.
            mask_T: Of all tokens, in float32 or float64.
        """
        wide, num_tokens = mask_T.dtype, logits_CV.shape[0]
        size = num_tokens  # one set of collectives per chunk
        if self.group is None:
            size = block_rows(logits_CV, logits_CV.shape[1], wide)
        total = mask_T.new_zeros(())
        for begin in range(0, num_tokens, size):
            part = logits_CV[begin : begin + size]
            rows = slice(start + begin, start + begin + part.shape[0])
            logits = part.to(wide)
            total += torch.dot(self.losses_and_gradient(logits, rows), mask_T[rows])
            if logits is not part:
                part.copy_(logits)
        return total


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        mask_T: Tensor,
        tp_group: dist.ProcessGroup | None,
        matmul: Matmul,
        softcap: float | None,
        chunk_bytes: int | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype, wide, kept = loss_dtypes(hidden_TH)
        mask_T = mask_T.to(wide)
        num_tokens, num_rows = hidden_TH.shape[0], weight_VH.shape[0]
        labels = _Labels(labels_T, num_rows, tp_group)
        size = chunk_rows(hidden_TH, labels.max_rows, chunk_bytes)
        buffer_CV = hidden_TH.new_empty((min(size, num_tokens), num_rows))
        loss = mask_T.new_zeros(())
        factor_VH = weight_VH.to(kept) if wants_hidden else None
        dhidden = torch.empty_like(hidden_TH, dtype=kept) if wants_hidden else None
        dweight: Tensor | None = None
        dbias = mask_T.new_zeros(num_rows) if wants_bias else None
        # A single chunk needs no sum: its result is the gradient, in the weight's dtype.
        sum_dtype = wide if num_tokens > size else kept
        for start in range(0, num_tokens, size):
            rows = slice(start, min(start + size, num_tokens))
            hidden_CH, mask_C1 = hidden_TH[rows], mask_T[rows].unsqueeze(1)
            logits = buffer_CV[: hidden_CH.shape[0]]
            matmul(hidden_CH, weight_VH.t(), out=logits)
            if bias_V is not None:
                logits += bias_V
            dlogits = logits.to(kept) if softcap is None else _capped(logits, softcap, kept)
            loss += labels.sum_and_gradient(dlogits, start, mask_T)
            if softcap is not None:  # logits are tanh(logit / softcap) here
                dlogits.addcmul_(dlogits, logits.square_(), value=-1)
            # Apply the mask to the narrow operand of each matmul.
            mask_C1 = mask_C1.to(kept)
            if dhidden is not None and factor_VH is not None:
                torch.mul(matmul(dlogits, factor_VH), mask_C1, out=dhidden[rows])
            if wants_weight:
                masked = hidden_CH.to(kept) * mask_C1
                dweight = plus_product(dweight, dlogits, masked, sum_dtype, matmul)
            if dbias is not None:
                dbias += matmul(mask_C1.t(), dlogits)[0]
        if wants_weight and dweight is None:  # no tokens
            dweight = torch.zeros_like(weight_VH)
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.dtypes = dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if gradient is None else _scaled(gradient, dloss, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, *(None,) * 6)


def _capped(logits_CV: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    """Overwrite logits with ``tanh(logit / softcap)``; return ``softcap`` times that, a copy."""
    return logits_CV.div_(softcap).tanh_().to(dtype, copy=True).mul_(softcap)


def _scaled(gradient: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient * dloss``, in place unless the graph is kept for another backward; skips
    the multiply if dloss is 1, where reading it needs no sync."""
    if dloss.device.type == "cpu" and dloss == 1:
        return gradient.to(dtype)
    if gradient.dtype == dtype:
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        return gradient * dloss if is_kept else gradient.mul_(dloss)
    scaled = torch.empty_like(gradient, dtype=dtype)
    size = block_rows(gradient, 1, gradient.dtype)
    for part, to in zip(gradient.view(-1).split(size), scaled.view(-1).split(size), strict=True):
        to.copy_(part * dloss)
    return scaled


class _VocabCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        tp_group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.dtype, wide, kept = loss_dtypes(logits_TV)
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
