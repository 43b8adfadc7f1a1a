"""Run one attention as calls of the fused operator: per rectangle, or for packed documents."""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T packed tokens

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ascend_run.ops.attention.blockwise_attention import bias_of, distances
from ascend_run.ops.attention.log_sum_exp import as_column
from ascend_run.ops.attention.visibility import Rectangle, Shape
from ascend_run.plugin_api import AttentionSpec, Dropout

from . import operators
from .masks import SharedMasks
from .operators import AttentionOut, Bias, Call, Drawn


class SavedDraws(NamedTuple):
    """Dropout state that is saved for backward."""

    calls: Tensor
    """[calls, 3], int64, on the host: seed, offset and length of each call."""


class Pieces:
    """ops.attention.pieced_attention.FusedKernel on [S, B, N, D], for one forward or one backward.

    Args:
        saved: The value that ``saved`` returned after the forward, for its backward.
    """

    sequence_axis = 0
    band_block = None  # a band is two numbers, for any length

    def __init__(
        self,
        spec: AttentionSpec,
        masks: SharedMasks,
        *,
        version: int,
        layout: str,
        saved: SavedDraws | tuple[()] = (),
    ) -> None:
        self._spec, self._masks = spec, masks
        self._version, self._layout = version, layout
        self._drawn = [Drawn(*row) for row in saved.calls.tolist()] if saved else []
        self._next = iter([*self._drawn])

    def saved(self) -> SavedDraws | tuple[()]:
        """Return the state of dropout for backward; empty without dropout."""
        if self._spec.dropout is None:
            return ()
        return SavedDraws(torch.tensor(self._drawn, dtype=torch.int64).reshape(-1, 3))

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """Return the rectangle itself: the operator's causal mode starts at the top left corner."""
        return (part,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        laid_q, laid_k, laid_v = (_laid_out(t, self._layout) for t in (q, k, v))
        result = operators.fusion_attention(laid_q, laid_k, laid_v, self._call(q, part))
        self._drawn.append(result.drawn)
        out, lse = _sequence_first(result.out, self._layout, q.shape), log_sum_exp(result)
        if self._spec.bias is None:
            return out, lse
        # If every key is masked, the log-sum-exp is near the masked score, far below any other.
        blind = lse < 0.75 * self._hidden_score(q.dtype)
        return out.masked_fill(as_column(blind), 0.0), lse.masked_fill(blind, -torch.inf)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: Rectangle,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._spec.bias is not None:  # a query that sees no key has only zero probabilities
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        largest, total = statistics(lse)
        laid_q, laid_k, laid_v, laid_dout = (_laid_out(t, self._layout) for t in (q, k, v, dout))
        gradients = operators.fusion_attention_grad(
            laid_q,
            laid_k,
            laid_v,
            laid_dout,
            self._call(q, part),
            out=_laid_out(out, self._layout),
            softmax_max=largest,
            softmax_sum=total,
            drawn=self._drawn_before(),
        )
        dq, dk, dv = (
            _sequence_first(gradient, self._layout, like.shape)
            for gradient, like in zip(gradients, (q, k, v), strict=True)
        )
        return dq, dk, dv

    def packed(self, q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int]) -> AttentionOut:
        """Compute the documents of one packed sequence, q, k and v [T, N, D], each causal."""
        result = operators.fusion_attention(q, k, v, self._packed_call(q, ends))
        self._drawn.append(result.drawn)
        return result

    def packed_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax: tuple[Tensor, Tensor],
        ends: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        return operators.fusion_attention_grad(
            q,
            k,
            v,
            dout,
            self._packed_call(q, ends),
            out=out,
            softmax_max=softmax[0],
            softmax_sum=softmax[1],
            drawn=self._drawn_before(),
        )

    def _drawn_before(self) -> Drawn:
        return next(self._next) if self._spec.dropout is not None else Drawn()

    @property
    def _keep_probability(self) -> float:
        dropout = self._spec.dropout
        return 1.0 if dropout is None else 1.0 - dropout.probability

    def _call(self, q_SBND: Tensor, part: Rectangle) -> Call:
        return Call(
            heads=q_SBND.shape[2],
            layout=self._layout,
            scale=self._spec.scale,
            sparsity=self._masks.of(part, q_SBND.device),
            bias=self._bias(q_SBND, part),
            keep_probability=self._keep_probability,
            version=self._version,
        )

    def _packed_call(self, q_TND: Tensor, ends: Sequence[int]) -> Call:
        sparsity = self._masks.documents(q_TND.device)
        return Call(
            heads=q_TND.shape[1],
            layout="TND",
            scale=self._spec.scale,
            sparsity=sparsity._replace(query_ends=ends, key_ends=ends),
            keep_probability=self._keep_probability,
            version=self._version,
        )

    def _bias(self, q: Tensor, part: Rectangle) -> Bias | None:
        spec = self._spec
        if spec.bias is None and spec.position_bias is None:
            return None
        if spec.bias is None and self._takes_slopes(part):
            return self._slopes(part)
        given = None if spec.bias is None else bias_of(spec.bias, part)
        if spec.position_bias is None:
            assert given is not None
            total = given
        else:
            slanted = self._slanted(part, q, whole=given is not None)
            total = slanted if given is None else given + slanted
        kind = operators.AFTER_SCALE
        if self._version == 1:
            total, kind = total / spec.scale, operators.BEFORE_SCALE
        total = total.to(q.dtype).clamp_min(self._hidden_bias(q.dtype))
        return Bias(_for_every_head(total, q, part).contiguous(), kind)

    def _hidden_bias(self, dtype: torch.dtype) -> float:
        """Return the finite bias that replaces -inf, also finite after the scale.

        The operator would subtract -inf from -inf if every key of a query in a call had it.
        """
        return torch.finfo(dtype).min / (2 * max(self._spec.scale, 1.0))

    def _hidden_score(self, dtype: torch.dtype) -> float:
        """Return the score of a masked key, without the product of query and key."""
        return self._hidden_bias(dtype) * (self._spec.scale if self._version == 1 else 1.0)

    def _takes_slopes(self, part: Rectangle) -> bool:
        """Return whether the operator computes the bias; it needs as many keys as queries."""
        return self._version == 2 and part.num_queries == part.num_keys

    def _slopes(self, part: Rectangle) -> Bias:
        rules, mask = self._spec.position_bias, self._spec.mask
        assert rules is not None
        return Bias(
            rules.slopes.float().contiguous(),
            operators.ROOT_SLOPES if rules.root else operators.SLOPES,
            query_start=mask.query_start + part.query_start,
            key_start=mask.key_start + part.key_start,
        )

    def _slanted(self, part: Rectangle, q: Tensor, *, whole: bool) -> Tensor:
        """Return a position bias as a matrix, [1, N, S, J].

        Returns only its last rows if the operator can derive the others from them.
        """
        rules = self._spec.position_bias
        assert rules is not None
        wide = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
        rows, most = part.num_queries, operators.COMPRESSED_BIAS_ROWS
        square = part.shape is Shape.CAUSAL and rows == part.num_keys
        if square and rows > most and not whole and not rules.root:
            first = part.query_end - most
            part = Rectangle(first, part.query_end, part.key_start, part.key_end, part.shape)
        away = distances(self._spec.mask, part, wide)
        slopes = rules.slopes.to(away)
        return -slopes[:, None, None].mul(away.sqrt() if rules.root else away).unsqueeze(0)


@contextmanager
def drawing_from(dropout: Dropout | None, device: torch.device) -> Iterator[None]:
    """Seed the device's generator for the operator's dropout, and restore it afterwards."""
    if dropout is None:
        yield
        return
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else cast("Any", torch).npu.default_generators[device.index or 0]
    )
    before = generator.get_state()
    generator.manual_seed(dropout.seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _for_every_head(bias: Tensor, q: Tensor, part: Rectangle) -> Tensor:
    """Expand a bias to [B, N, S, J], [1, N, S, J] or [B, N, 1, J], as the operator expects it."""
    batch, rows = bias.shape[0], bias.shape[2]
    if rows == 1:
        batch = q.shape[1]
    return bias.expand(batch, q.shape[2], rows, part.num_keys)


def _laid_out(x_SBND: Tensor, layout: str) -> Tensor:
    if layout == "SBH":
        return x_SBND.flatten(2).contiguous()
    if layout == "BSH":
        return x_SBND.transpose(0, 1).flatten(2).contiguous()
    if layout == "BSND":
        return x_SBND.transpose(0, 1).contiguous()
    assert layout == "BNSD"
    return x_SBND.permute(1, 2, 0, 3).contiguous()


def _sequence_first(x: Tensor, layout: str, shape_SBND: torch.Size) -> Tensor:
    """Transpose back to [S, B, N, D]."""
    sequence, batch, heads, width = shape_SBND
    if layout == "SBH":
        return x.view(sequence, batch, heads, width)
    if layout == "BNSD":
        return x.permute(2, 0, 1, 3)
    return x.view(batch, sequence, heads, width).transpose(0, 1)


def log_sum_exp(result: AttentionOut) -> Tensor:
    """Return the log-sum-exp, [B, N, S] or [T, N]."""
    return result.softmax_max[..., 0] + result.softmax_sum[..., 0].log()


def statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maximum score, sum of exponentials) with the same probabilities.

    Both have the operator's shape.
    """
    shape = (*lse.shape, operators.STATISTICS_WIDTH)
    largest = lse.unsqueeze(-1).expand(shape).contiguous()
    return largest, torch.ones_like(largest)
