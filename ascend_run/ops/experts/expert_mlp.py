"""The MLP of all experts as one differentiable operation with a manual backward.

It saves the tokens (if their weight is trained), the first GEMM's output and, for SwiGLU, the
activated gate: 3 F values a token besides the tokens, where autograd saves 5 F. Cheap intermediates
are recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.tensor_marks import mark
from ascend_run.types.moe import GroupedGemm

from .grouped_matmul import (
    GROUPS,
    Backend,
    Counts,
    MakeGroups,
    choose,
    native_takes,
    on_host,
)
from .grouped_widths import row_elements
from .quantised_matmul import spread

# T tokens sorted by expert, H hidden size, F expert width, X experts

CACHE_ELEMENTS: Final = 1 << 19
"""Elements of an intermediate that the elementwise part processes at a time on a CPU: several such
tensors fit in the cache, and take far longer than the calls."""


def expert_mlp(
    tokens_TH: Tensor,
    counts: Counts,
    probs_T: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    *,
    function: Callable[[Tensor], Tensor] = F.silu,
    gated: bool = True,
    is_silu: bool = True,
    fused: Callable[[Tensor], Tensor] | None = None,
    swiglu: SwiGlu | None = None,
    backend: Backend | MakeGroups | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Compute ``probs * (act(x @ fc1.T + fc1_bias) @ fc2.T + fc2_bias)`` with each token's expert.

    Args:
        tokens_TH: Sorted by expert.
        counts: Tokens of each expert, on the host; or on the device, where they stay if the backend
            is a platform's own that accepts that, or torch's grouped GEMM supports the operands.
        probs_T: Any floating dtype; cast to that of the tokens.
        fc1: [X, 2F, H], gate rows before up rows; [X, F, H] if not gated.
        fc2: [X, H, F].
        fc1_bias, fc2_bias: [X, 2F] (or [X, F]) and [X, H], both or none.
        function: The activation; of the gate if gated.
        is_silu: Whether it is SiLU, which has a manual backward.
        fused: The full activation, [t, 2F] -> [t, F], a differentiable operator that replaces
            ``function``; recomputed in backward.
        swiglu: What computes a gated SiLU; default: torch's operations.
        backend: A name, or a factory of a partition's grouped GEMMs; default: ``choose``.
        accumulate: Add the weights' gradients directly to their ``main_grad``, if data parallelism
            has set one, instead of to a separate tensor.

    Returns:
        [T, H], differentiable in all tensors; an empty expert's gradients are zeros.
    """
    if backend is None:
        widths = (*fc1.shape[1:], *fc2.shape[1:])
        if isinstance(counts, Tensor) and native_takes(
            tokens_TH.device.type, tokens_TH.dtype, widths
        ):
            backend = "grouped_mm"
        else:
            counts = on_host(counts)
            backend = choose(counts, tokens_TH.device, tokens_TH.dtype, widths)
    if fused is not None:
        activation: SwiGlu | AutogradActivation = AutogradActivation(fused, gated=False)
    else:
        own = gated and is_silu
        activation = (swiglu or SwiGlu()) if own else AutogradActivation(function, gated)
    make = GROUPS[backend] if isinstance(backend, str) else backend
    groups = make(counts, tokens_TH.device)
    weights = (fc1, fc2, fc1_bias, fc2_bias)
    out: Tensor = _ExpertMlp.apply(
        tokens_TH, probs_T, *weights, counts, groups, activation, accumulate
    )
    return out


class _ExpertMlp(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens_TH: Tensor,
        probs_T: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        fc1_bias: Tensor | None,
        fc2_bias: Tensor | None,
        counts: Counts,
        groups: GroupedGemm,
        activation: SwiGlu | AutogradActivation,
        accumulate: bool,
    ) -> Tensor:
        hidden = groups.matmul(tokens_TH, fc1.transpose(1, 2))
        if fc1_bias is not None:
            hidden += _spread(fc1_bias, counts, hidden)
        probs_T1 = probs_T.to(hidden.dtype).unsqueeze(-1)
        act_TF = hidden.new_empty(hidden.shape[0], fc2.shape[2])
        kept = hidden.new_empty(act_TF.shape if activation.keeps else (act_TF.shape[0], 0))
        for rows in _row_blocks(act_TF):
            activation.forward(hidden[rows], probs_T1[rows], out=act_TF[rows], kept=kept[rows])
        ctx.counts, ctx.groups = counts, groups
        ctx.activation = activation
        # Not unpacked from what is saved: hooks on saved tensors would lose their ``main_grad``.
        ctx.accumulated = (fc1, fc2) if accumulate else (None, None)
        # The tokens are only needed for the gradient of a weight.
        read_TH = tokens_TH if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(read_TH, probs_T, fc1, fc2, fc2_bias, hidden, kept)
        out_TH = groups.matmul(act_TF, fc2.transpose(1, 2))
        if fc2_bias is not None:
            out_TH += _spread(fc2_bias, counts, out_TH) * probs_T1
        return out_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        tokens_TH, probs_T, fc1, fc2, fc2_bias, hidden, kept = ctx.saved_tensors
        counts, groups, activation = ctx.counts, ctx.groups, ctx.activation
        needs_tokens, _, needs_fc1, needs_fc2, *needs_biases, _, _, _, _ = ctx.needs_input_grad
        probs_T1 = probs_T.to(hidden.dtype).unsqueeze(-1)
        dact_TF = groups.matmul(dy_TH, fc2)
        act_TF, dhidden = torch.empty_like(dact_TF), torch.empty_like(hidden)
        dprobs_T1 = torch.empty_like(probs_T1)
        for rows in _row_blocks(act_TF):
            activation.backward(
                dact_TF[rows],
                hidden[rows],
                probs_T1[rows],
                kept[rows],
                act=act_TF[rows],
                dhidden=dhidden[rows],
                dprobs=dprobs_T1[rows],
            )
        if fc2_bias is not None:
            biases_TH = _spread(fc2_bias, counts, dy_TH)
            dprobs_T1 += (dy_TH * biases_TH).sum(dim=-1, keepdim=True)
        dfc1_bias = _sums(dhidden, counts, groups) if needs_biases[0] else None
        dfc2_bias = _sums(dy_TH * probs_T1, counts, groups) if needs_biases[1] else None
        own_fc1, own_fc2 = ctx.accumulated
        dfc2 = weight_gradient(groups, own_fc2, dy_TH, act_TF) if needs_fc2 else None
        del dact_TF, act_TF
        dfc1 = weight_gradient(groups, own_fc1, dhidden, tokens_TH) if needs_fc1 else None
        dtokens = groups.matmul(dhidden, fc1) if needs_tokens else None
        dprobs = dprobs_T1.squeeze(-1).to(probs_T.dtype)
        return (dtokens, dprobs, dfc1, dfc2, dfc1_bias, dfc2_bias, *(None,) * 4)


def _spread(biases: Tensor, counts: Counts, rows: Tensor) -> Tensor:
    """Repeat each expert's bias for each of its rows, without synchronising."""
    if not isinstance(counts, Tensor):
        return spread(biases, counts)
    return biases.repeat_interleave(counts, dim=0, output_size=rows.shape[0])


def _sums(rows: Tensor, counts: Counts, groups: GroupedGemm) -> Tensor:
    """Return the sum of the rows of each expert: [T, N] -> [X, N].

    With counts on the device it is a grouped GEMM with ones, in as many columns as it takes.
    """
    if not isinstance(counts, Tensor):
        return torch.stack([part.sum(dim=0) for part in rows.split([*counts])])
    ones = rows.new_ones(rows.shape[0], row_elements(rows.itemsize))
    return groups.outer(rows, ones)[..., 0]


def weight_gradient(
    groups: GroupedGemm, accumulated: Tensor | None, a_TN: Tensor, b_TK: Tensor
) -> Tensor:
    """Return the gradient of a weight, or an empty tensor if it was added to ``main_grad``.

    Args:
        accumulated: The weight, if its gradient is accumulated.

    Megatron's data parallelism reads the mark and then drops the tensor without adding it; the
    tensor's presence signals that the gradient is ready.
    """
    main_grad: Tensor | None = getattr(accumulated, "main_grad", None)
    if accumulated is None or main_grad is None:
        return groups.outer(a_TN, b_TK)
    groups.add_outer(main_grad, a_TN, b_TK)
    mark(accumulated, grad_added_to_main_grad=True)
    return torch.empty_like(accumulated)


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Yield the rows to process at a time: on a CPU few enough to stay in cache, else all."""
    rows = max(1, CACHE_ELEMENTS // x.shape[1]) if x.device.type == "cpu" else x.shape[0]
    for start in range(0, x.shape[0], max(rows, 1)):
        yield slice(start, start + rows)


class SwiGlu:
    """``probs * silu(gate) * up`` with a manual backward. Source: arXiv:2002.05202."""

    keeps = True

    def forward(self, hidden: Tensor, probs: Tensor, *, out: Tensor, kept: Tensor) -> None:
        """Write the output of [t, 2F] and [t, 1] to ``out`` [t, F], and silu(gate) to ``kept`` [t,
        F]."""
        gate, up = hidden.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=kept)
        torch.mul(kept, up, out=out).mul_(probs)

    def backward(
        self,
        dact: Tensor,
        hidden: Tensor,
        probs: Tensor,
        kept: Tensor,
        *,
        act: Tensor,
        dhidden: Tensor,
        dprobs: Tensor,
    ) -> None:
        """Fill ``act`` (recomputed), ``dhidden`` and ``dprobs``; overwrites ``dact``."""
        gate, up = hidden.chunk(2, dim=-1)
        dgate, dup = dhidden.chunk(2, dim=-1)
        product = torch.mul(kept, up, out=act)
        torch.sum(dact * product, dim=-1, keepdim=True, out=dprobs)
        act.mul_(probs)
        dproduct = dact.mul_(probs)
        torch.mul(dproduct, kept, out=dup)
        torch.ops.aten.silu_backward.grad_input(dproduct.mul_(up), gate, grad_input=dgate)


class AutogradActivation:
    """Any other activation, or a fused operator (which is not gated here); its backward is
    autograd's, block by block."""

    keeps = False

    def __init__(self, function: Callable[[Tensor], Tensor], gated: bool) -> None:
        self.function, self.gated = function, gated

    def forward(self, hidden: Tensor, probs: Tensor, *, out: Tensor, kept: Tensor) -> None:
        """Write the output of [t, 2F] (or [t, F]) and [t, 1] to ``out`` [t, F]; saves nothing."""
        torch.mul(self._activate(hidden), probs, out=out)

    def backward(
        self,
        dact: Tensor,
        hidden: Tensor,
        probs: Tensor,
        kept: Tensor,
        *,
        act: Tensor,
        dhidden: Tensor,
        dprobs: Tensor,
    ) -> None:
        """Fill ``act`` (recomputed), ``dhidden`` and ``dprobs``."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            product = self._activate(leaf)
        torch.sum(dact * product.detach(), dim=-1, keepdim=True, out=dprobs)
        torch.mul(product.detach(), probs, out=act)
        dhidden.copy_(torch.autograd.grad(product, leaf, dact * probs)[0])

    def _activate(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.function(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return self.function(gate) * up
