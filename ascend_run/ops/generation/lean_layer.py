"""A transformer layer as few calls of torch, for the few tokens of a step.

A layer of modules spends most of a token's time on calls of Python. This one computes the same
function of the same parameters, by their tensors alone.
"""

# T tokens of a step, H hidden size, N query heads, G key-value heads, D head width, R rotated width
# (at most D), K inputs and W outputs of a projection; heads, K and W are those of this rank

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from ascend_run.ops.linear.packed_linear import PackedWeight
from ascend_run.ops.linear.plain_matmuls import Group
from ascend_run.types.attention import AttentionSpec

from .cached_attention import CachedAttention

OfRows: TypeAlias = Callable[[Tensor], Tensor]
"""A function of each row alone, [T, ...] -> [T, ...]."""


@attrs.frozen(kw_only=True, eq=False)
class LeanNorm:
    """RMSNorm, or LayerNorm if it has a bias or ``centers``, over the last dim.

    Numerics: of half precisions, statistics in float32.
    """

    weight_H: Tensor
    bias_H: Tensor | None
    centers: bool
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.centers:
            return F.layer_norm(x, self.weight_H.shape, self.weight_H, self.bias_H, self.eps)
        return F.rms_norm(x, self.weight_H.shape, self.weight_H, self.eps)


@attrs.frozen(eq=False)
class LeanLinear:
    """A linear with its bias: [T, K] -> [T, W]."""

    weight: PackedWeight
    bias_W: Tensor | None
    group: Group | None = None
    """Ranks that have a share of K each, whose products are summed; None: this one has all of K."""

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self.group is None:
            return self.weight(x_TK, self.bias_W)
        out_TW = self.weight(x_TK)
        dist.all_reduce(out_TW, group=self.group)
        return out_TW if self.bias_W is None else out_TW + self.bias_W


@attrs.define(eq=False)
class StepAngles:
    """Factors of the rotation of a step's tokens, computed once for all layers.

    Args:
        interleaved: Whether pairs are (2i, 2i + 1), else (i, i + R/2).
    """

    interleaved: bool
    _of: Tensor | None = None
    _factors: tuple[tuple[Tensor, Tensor], ...] = ()

    def rotate(self, x: Tensor, tables: Tensor, has_window: bool) -> Tensor:
        """Rotate the first R of the last dim of [T, ..., D], four dims in all.

        Args:
            tables: Cosines and sines [2, T, R], or those of both kinds of layers, [2, 2, T, R].
            has_window: Of the layer; selects one of both.
        """
        if self._of is not tables:
            self._of = tables
            kinds = (tables,) if tables.dim() == 3 else tables.unbind(0)
            self._factors = tuple(self._signed(kind.to(x.dtype)) for kind in kinds)
        cos, sin = self._factors[has_window if len(self._factors) > 1 else 0]
        width = cos.shape[-1]
        turned = x if width == x.shape[-1] else x[..., :width]
        out = torch.addcmul(turned * cos, self._swapped(turned), sin)
        return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)

    def _signed(self, tables_2TR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of x and of its swapped pairs, [T, 1, 1, R]."""
        cos_TR, sin_TR = tables_2TR.unbind(0)
        signs_R = sin_TR.new_ones(sin_TR.shape[-1])
        first = slice(0, None, 2) if self.interleaved else slice(0, len(signs_R) // 2)
        signs_R[first] = -1.0
        return cos_TR[:, None, None], (sin_TR * signs_R)[:, None, None]

    def _swapped(self, x: Tensor) -> Tensor:
        """Swap the two of each pair."""
        if self.interleaved:
            pairs: Tensor = x.unflatten(-1, (-1, 2))
            return pairs.flip(-1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((second, first), -1)


@attrs.frozen(kw_only=True, eq=False)
class LeanAttention:
    """Self-attention of a step: [T, H] -> [T, H].

    The entries of ``qkv`` are in Megatron's order: of each key-value group of this rank its
    queries, its key, its value.
    """

    qkv: OfRows
    proj: LeanLinear
    kernel: CachedAttention
    spec: AttentionSpec
    num_groups: int
    width: int  #: D.
    angles: StepAngles
    q_norm: OfRows | None
    k_norm: OfRows | None

    def __call__(
        self, x_TH: Tensor, tables: Tensor | None, query_scale_T11: Tensor | None
    ) -> Tensor:
        mixed = self.qkv(x_TH).view(len(x_TH), self.num_groups, -1, self.width)
        v_TGD = mixed[:, :, -1]
        if self.q_norm is None or self.k_norm is None:
            turning = mixed[:, :, :-1]
        else:
            turning = torch.cat((self.q_norm(mixed[:, :, :-2]), self.k_norm(mixed[:, :, -2:-1])), 2)
        if tables is not None:
            has_window = self.spec.mask.window is not None
            turning = self.angles.rotate(turning, tables, has_window)
        q_TND = turning[:, :, :-1].reshape(len(x_TH), -1, self.width)
        if query_scale_T11 is not None:
            q_TND = q_TND * query_scale_T11
        out_TNE = self.kernel.of_step(q_TND, turning[:, :, -1], v_TGD, self.spec)
        return self.proj(out_TNE.flatten(1))


def swiglu(x_TF: Tensor) -> Tensor:
    """Gate rows, then up rows: [T, 2F] -> [T, F], without an autograd function."""
    gate, up = x_TF.chunk(2, -1)
    return F.silu(gate) * up


@attrs.frozen(kw_only=True, eq=False)
class LeanMlp:
    """[T, H] -> [T, H]; gated where the activation halves the width."""

    fc1: LeanLinear
    activation: OfRows
    fc2: LeanLinear

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x_TH)))


@attrs.frozen(kw_only=True, eq=False)
class LeanResidual:
    """``residual + multiplier * norm(x)``."""

    norm: OfRows | None
    multiplier: float

    def __call__(self, x_TH: Tensor, residual_TH: Tensor) -> Tensor:
        x_TH = x_TH if self.norm is None else self.norm(x_TH)
        return torch.add(residual_TH, x_TH, alpha=self.multiplier)


@attrs.frozen(kw_only=True, eq=False)
class LeanLayer:
    """A layer: attention and MLP, each with a norm before it or none, and its residual."""

    attention_norm: OfRows | None
    attention: LeanAttention
    attention_residual: LeanResidual
    mlp_norm: OfRows | None
    mlp: OfRows
    mlp_residual: LeanResidual

    def __call__(
        self, x_TH: Tensor, tables: Tensor | None, query_scale_T11: Tensor | None = None
    ) -> Tensor:
        """Compute the step that runs.

        Args:
            tables: Rotary tables of its tokens; see ``StepAngles.rotate``.
            query_scale_T11: Factor of each token's queries, such as a log-n scale.
        """
        normed = x_TH if self.attention_norm is None else self.attention_norm(x_TH)
        x_TH = self.attention_residual(self.attention(normed, tables, query_scale_T11), x_TH)
        normed = x_TH if self.mlp_norm is None else self.mlp_norm(x_TH)
        return self.mlp_residual(self.mlp(normed), x_TH)
