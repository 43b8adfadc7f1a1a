"""An MLP of two tensor-parallel linears with low-rank adapters, as one differentiable function.

The weights are frozen, so backward reads neither of their inputs. Saved are the input of the first
adapter, the output of the first linear, and the outputs of both A; the activation is recomputed
in backward. Nothing of the full width is gathered for backward but the output's gradient, once.

Source: the behaviour of MindSpeed-LLM's fused MLP; the schedule of each linear is that of
``adapted_linear``.
"""

# T rows (tokens) on this rank, H hidden size, F width between the linears on this rank, K inputs
# and N outputs of one linear, R rank of its adapter

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function

from .adapted_linear import (
    Gradients,
    Schedule,
    Weights,
    column_backward,
    column_forward,
    frozen,
    row_backward,
    row_forward,
)


@attrs.frozen(kw_only=True)
class MlpLinear:
    """One linear and its adapter."""

    make_weight_NK: Callable[[], Tensor]
    """Returns the weight, which is frozen; see ``adapted_linear``."""
    a_RK: Tensor
    parts: Sequence[Tensor]
    """Parameters of B."""
    make_b_RN: Callable[[Sequence[Tensor]], Tensor]
    """Makes B, with the adapter's scale, of these parameters. It is made again in backward instead
    of being saved."""
    schedule: Schedule
    dropped: Callable[[Tensor], Tensor]
    """Dropout of the adapter's input."""
    dropout: float = 0.0
    """Its probability; 0: ``dropped`` is not called."""

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the adapter's input, and which elements are kept; None without dropout."""
        if not self.dropout:
            return x, None
        kept = self.dropped(torch.ones_like(x)) != 0
        return self.scaled(x, kept), kept

    def scaled(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """Apply dropout to the adapter's input, or to its gradient."""
        if kept is None:
            return x
        return kept.to(x.dtype).div_(1.0 - self.dropout).mul_(x)

    def dx(self, found: Gradients, kept: Tensor | None) -> Tensor:
        """Return the gradient of the linear's input, which the adapter reads too."""
        if found.dadapter_x is None:
            return found.dx
        return found.dx.add_(self.scaled(found.dadapter_x, kept))


@attrs.frozen(kw_only=True)
class AdaptedMlp:
    """What ``adapted_mlp`` computes with."""

    fc1: MlpLinear
    """Column-parallel."""
    fc2: MlpLinear
    """Row-parallel."""
    activation: Callable[[Tensor], Tensor]
    """[T, outputs of fc1] -> [T, F], deterministic; called again in backward."""
    bias_N: Tensor | None = None
    """Of fc1; frozen."""


def adapted_mlp(x: Tensor, mlp: AdaptedMlp) -> Tensor:
    """Compute ``fc2(activation(fc1(x)))``, [..., H] -> [..., H], without the bias of fc2.

    Numerics: as ``adapted_linear``, the activation and ``adapted_linear`` apart.

    Raises:
        ValueError: A weight or the bias requires a gradient, or an adapter is merged that has
            dropout.
    """
    if mlp.bias_N is not None and mlp.bias_N.requires_grad:
        raise ValueError("the bias of fc1 is frozen; this one requires a gradient")
    for name, linear in (("fc1", mlp.fc1), ("fc2", mlp.fc2)):
        if linear.schedule.merges and linear.dropout:
            raise ValueError(
                f"the adapter of {name} reads another input with dropout={linear.dropout}; it "
                "cannot be merged into the weight"
            )
    factors = (mlp.fc1.a_RK, mlp.fc2.a_RK, *mlp.fc1.parts, *mlp.fc2.parts)
    out: Tensor = _AdaptedMlp.apply(x, mlp, *factors)
    return out


class _AdaptedMlp(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mlp: AdaptedMlp, a1: Tensor, a2: Tensor, *parts: Tensor
    ) -> Tensor:
        fc1, fc2, rows, first = mlp.fc1, mlp.fc2, x.flatten(0, -2), len(mlp.fc1.parts)
        read, kept = fc1.read(rows)
        weights = Weights(frozen(fc1.make_weight_NK(), "fc1"), a1, fc1.make_b_RN(parts[:first]))
        hidden, narrow = column_forward(rows, read, weights, fc1.schedule)
        del weights  # made of its form in storage, it is as large as fc1 itself
        if mlp.bias_N is not None:
            hidden += mlp.bias_N
        product = mlp.activation(hidden)
        read_again, kept_again = fc2.read(product)
        weights = Weights(frozen(fc2.make_weight_NK(), "fc2"), a2, fc2.make_b_RN(parts[first:]))
        out, summed = row_forward(product, read_again, weights, fc2.schedule)
        ctx.shape, ctx.mlp = x.shape, mlp
        ctx.save_for_backward(read, kept, narrow, hidden, kept_again, summed, a1, a2, *parts)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        read, kept, narrow, hidden, kept_again, summed, a1, a2, *parts = ctx.saved_tensors
        fc1, fc2, first = ctx.mlp.fc1, ctx.mlp.fc2, len(ctx.mlp.fc1.parts)
        # It depends on no gradient, so it overlaps with the whole backward of fc2.
        gathered = fc1.schedule.begin_narrow(narrow, len(hidden))
        product, dhidden_of = _differentiable(lambda one: ctx.mlp.activation(*one), [hidden])
        b2, dparts2_of = _differentiable(fc2.make_b_RN, parts[first:])
        found = row_backward(
            dy.flatten(0, -2),
            fc2.scaled(product, kept_again),
            fc2.schedule.begin_narrow(summed, dy[..., 0].numel()),
            Weights(fc2.make_weight_NK(), a2, b2),
            fc2.schedule,
        )
        (dhidden,) = dhidden_of(fc2.dx(found, kept_again))
        da2, dparts2 = found.da, dparts2_of(found.db)
        del product, dhidden_of, found
        b1, dparts1_of = _differentiable(fc1.make_b_RN, parts[:first])
        weights = Weights(fc1.make_weight_NK(), a1, b1)
        found = column_backward(dhidden, read, gathered, weights, fc1.schedule)
        dx = fc1.dx(found, kept).view(ctx.shape)
        return dx, None, found.da, da2, *dparts1_of(found.db), *dparts2


def _differentiable(
    function: Callable[[Sequence[Tensor]], Tensor], given: Sequence[Tensor]
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """Return what a function returns of tensors, and the function from its gradient to theirs."""
    leaves = [one.detach().requires_grad_() for one in given]
    with torch.enable_grad():
        out = function(leaves)

    def gradients(upstream: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(out, leaves, upstream)

    return out.detach(), gradients
