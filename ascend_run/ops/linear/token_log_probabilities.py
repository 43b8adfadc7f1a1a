"""The log-probability of each token's label, without materialising all logits.

What a task computes of them decides each token's upstream gradient, so forward keeps one number a
token, the logarithm of the sum of exponentials, and backward recomputes a chunk's logits.

Source: the backward pass of arXiv:2411.09009, section 4.3; vocabulary parallelism as in
Megatron-LM, arXiv:1909.08053, section 3.
"""

# T tokens, C tokens of a chunk, H hidden size, V vocabulary on this rank

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function

from .vocabulary_shard import ShardLabels, block_rows, chunk_rows, loss_dtypes, softmax_
from .weight_gradient import plus_product
from .wide_matmul import Matmul


def token_log_probabilities(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    matmul: Matmul = torch.mm,
    softcap: float | None = None,
    bias_V: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Compute ``weight[label_t] @ hidden_t - logsumexp(weight @ hidden_t)`` of each token.

    Args:
        labels_T: int64, indices into the full vocabulary.
        tp_group: Ranks that hold consecutive rows of the vocabulary, possibly none (a vocabulary
            ends before its padding does); None if this rank holds all. Every rank returns the same
            values and has to pass the same upstream gradient; the gradient of the hidden state is
            this rank's contribution, which the caller reduces.
        matmul: Multiplies two matrices.
        softcap: c of ``c * tanh(logit / c)``, taken of every logit; None for the logits themselves.
        bias_V: Added to each token's logits.
        chunk_bytes: Logits held at a time, at least those of one token; None is the default of
            ``chunk_rows``.

    Returns:
        [T] in float32, or float64 for float64 inputs.

    Numerics: logits in the inputs' dtype; soft cap, softmax, sums and the product with the upstream
    gradient in float32 (float64). Gradients by matmuls in the inputs' dtype; in float32 for fp16.
    """
    out: Tensor = _TokenLogProbabilities.apply(
        hidden_TH, weight_VH, bias_V, labels_T, tp_group, matmul, softcap, chunk_bytes
    )
    return out


def vocab_log_probabilities(
    logits_TV: Tensor, labels_T: Tensor, tp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Compute the same from existing logits; their gradient is in their dtype."""
    out: Tensor = _VocabLogProbabilities.apply(logits_TV, labels_T, tp_group)
    return out


class _Sums:
    """Per token, the logarithm of the sum of exponentials and the label's logit, [T, 1] each."""

    def __init__(self, labels: ShardLabels, like: Tensor, softcap: float | None = None) -> None:
        self.labels, self.softcap = labels, softcap
        _, self.wide, _ = loss_dtypes(like)
        shape = labels.index_T1.shape
        self.target_T1 = like.new_zeros(shape, dtype=self.wide)
        self.log_total_T1 = like.new_full(shape, -torch.inf, dtype=self.wide)

    def add(self, logits_CV: Tensor, start: int) -> None:
        """Enter the tokens of a chunk; rows of this rank's shard alone.

        Args:
            start: First token of the chunk.
        """
        if not logits_CV.shape[1]:  # only padding on this rank
            return
        for rows, wide in _blocks(logits_CV, start, self.wide):
            if self.softcap is not None:
                wide.div_(self.softcap).tanh_().mul_(self.softcap)
            self.target_T1[rows] = self.labels.logits_of(wide, rows)
            self.log_total_T1[rows] = softmax_(wide)

    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Return those of the labels [T], and the logarithms of sums over all ranks [T, 1]."""
        group = self.labels.group
        if group is None:
            return (self.target_T1 - self.log_total_T1).squeeze(1), self.log_total_T1
        largest = self.log_total_T1.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack(((self.log_total_T1 - largest).exp(), self.target_T1))
        dist.all_reduce(sums, group=group)
        log_total = largest + sums[0].log()
        return (sums[1] - log_total).squeeze(1), log_total


def _blocks(logits_CV: Tensor, start: int, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each block of rows, and a copy of its logits in the dtype of sums."""
    size = block_rows(logits_CV, logits_CV.shape[1], wide)
    for begin in range(0, logits_CV.shape[0], size):
        part = logits_CV[begin : begin + size]
        first = start + begin
        yield slice(first, first + part.shape[0]), part.to(wide, copy=True)


def _overwrite_by_gradient(
    logits_CV: Tensor,
    dlogits_CV: Tensor,
    start: int,
    *,
    labels: ShardLabels,
    log_total_T1: Tensor,
    upstream_T1: Tensor,
    softcap: float | None = None,
    dbias: Tensor | None = None,
) -> None:
    """Write ``upstream * (one_hot - softmax)`` of a chunk, through the soft cap; add it to
    ``dbias``.

    Args:
        dlogits_CV: Where to; ``logits_CV`` itself or a tensor of its shape.
        start: First token of the chunk.
    """
    for rows, wide in _blocks(logits_CV, start, log_total_T1.dtype):
        tanh = None
        if softcap is not None:
            tanh = wide.div_(softcap).tanh_()
            wide = tanh * softcap
        wide.sub_(log_total_T1[rows]).exp_()
        labels.subtract_one_hot(wide, rows)
        wide.mul_(-upstream_T1[rows])
        if tanh is not None:
            wide.addcmul_(wide, tanh.square_(), value=-1)
        if dbias is not None:
            dbias += wide.sum(0)
        dlogits_CV[rows.start - start : rows.stop - start] = wide


def _chunks(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, matmul: Matmul, size: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each chunk and its logits [C, V], all in one buffer."""
    num_tokens, num_rows = hidden_TH.shape[0], weight_VH.shape[0]
    buffer_CV = hidden_TH.new_empty((min(size, num_tokens), num_rows))
    for start in range(0, num_tokens, size):
        rows = slice(start, min(start + size, num_tokens))
        logits = buffer_CV[: rows.stop - start]
        matmul(hidden_TH[rows], weight_VH.t(), out=logits)
        if bias_V is not None:
            logits += bias_V
        yield rows, logits


class _TokenLogProbabilities(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        tp_group: dist.ProcessGroup | None,
        matmul: Matmul,
        softcap: float | None,
        chunk_bytes: int | None,
    ) -> Tensor:
        labels = ShardLabels(labels_T, weight_VH.shape[0], tp_group)
        size = chunk_rows(hidden_TH, weight_VH.shape[0], chunk_bytes)
        sums = _Sums(labels, hidden_TH, softcap)
        for rows, logits in _chunks(hidden_TH, weight_VH, bias_V, matmul, size):
            sums.add(logits, rows.start)
        out, log_total = sums.log_probabilities()
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, log_total)
        ctx.labels, ctx.matmul, ctx.softcap, ctx.size = labels, matmul, softcap, size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, log_total = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        _, wide, kept = loss_dtypes(hidden_TH)
        factor_VH = weight_VH.to(kept) if wants_hidden else None
        dhidden = torch.empty_like(hidden_TH) if wants_hidden else None
        dweight: Tensor | None = None
        dbias = log_total.new_zeros(weight_VH.shape[0]) if wants_bias else None
        # A single chunk needs no sum: its result is the gradient.
        sum_dtype = wide if hidden_TH.shape[0] > ctx.size else kept
        for rows, logits in _chunks(hidden_TH, weight_VH, bias_V, ctx.matmul, ctx.size):
            dlogits = logits if logits.dtype == kept else torch.empty_like(logits, dtype=kept)
            _overwrite_by_gradient(
                logits,
                dlogits,
                rows.start,
                labels=ctx.labels,
                log_total_T1=log_total,
                upstream_T1=upstream_T.unsqueeze(1),
                softcap=ctx.softcap,
                dbias=dbias,
            )
            if dhidden is not None and factor_VH is not None:
                dhidden[rows] = ctx.matmul(dlogits, factor_VH)
            if wants_weight:
                hidden = hidden_TH[rows].to(kept)
                dweight = plus_product(dweight, dlogits, hidden, sum_dtype, ctx.matmul)
        if wants_weight and dweight is None:  # no tokens
            dweight = torch.zeros_like(weight_VH)
        dweight = None if dweight is None else dweight.to(weight_VH.dtype)
        dbias = None if dbias is None else dbias.to(bias_V.dtype)
        return (dhidden, dweight, dbias, *(None,) * 5)


class _VocabLogProbabilities(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, tp_group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.labels = ShardLabels(labels_T, logits_TV.shape[1], tp_group)
        sums = _Sums(ctx.labels, logits_TV)
        sums.add(logits_TV, 0)
        out, log_total = sums.log_probabilities()
        ctx.save_for_backward(logits_TV, log_total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, log_total = ctx.saved_tensors
        dlogits = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
        _overwrite_by_gradient(
            logits_TV,
            dlogits,
            0,
            labels=ctx.labels,
            log_total_T1=log_total,
            upstream_T1=upstream_T.unsqueeze(1),
        )
        return dlogits, None, None
