"""One attention in calls of the fused operator: rectangle by rectangle, or packed documents."""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T packed tokens

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ascend_run.ops.attention.blockwise_attention import bias_of, distances
from ascend_run.ops.attention.log_sum_exp import as_column
from ascend_run.ops.attention.visibility import Rectangle, Shape
from ascend_run.plugin_api import AttentionSpec, Dropout

from . import operators
from .masks import SharedMasks
from .operators import AttentionOut, Bias, Call, Drawn


class Pieces:
    """ops.attention.pieced_attention.FusedKernel on [S, B, N, D], for one forward or one backward.

    Args:
        saved: What ``saved`` answered after the forward, for its backward.
    """

    sequence_axis = 0
    band_block = None  # its bands are two numbers, of any length

    def __init__(
        self,
        spec: AttentionSpec,
        masks: SharedMasks,
        *,
        version: int,
        layout: str,
        saved: tuple[Tensor, ...] = (),
    ) -> None:
        self._spec, self._masks = spec, masks
        self._version, self._layout = version, layout
        self._drawn = [Drawn(*row) for (rows,) in [saved] for row in rows.tolist()] if saved else []
        self._next = iter([*self._drawn])

    def saved(self) -> tuple[Tensor, ...]:
        """With dropout one tensor on the host, int64: seed, offset and length for each call."""
        if self._spec.dropout is None:
            return ()
        return (torch.tensor(self._drawn, dtype=torch.int64).reshape(-1, 3),)

    def cut(self, part: Rectangle) -> Sequence[Rectangle]:
        """It takes them all: its causal mode counts from the upper left corner."""
        return (part,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
    ) -> tuple[Tensor, Tensor]:
        tensors = (_laid_out(t, self._layout) for t in (q, k, v))
        answer = operators.fusion_attention(*tensors, self._call(q, part))
        self._drawn.append(answer.drawn)
        out, lse = _sequence_first(answer.out, self._layout, q.shape), log_sum_exp(answer)
        if self._spec.bias is None:
            return out, lse
        # Every key hidden: what is left is near the hidden score, and far below any other.
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
        if self._spec.bias is not None:  # of a query that sees no key every probability is 0
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        largest, total = statistics(lse)
        gradients = operators.fusion_attention_grad(
            *(_laid_out(t, self._layout) for t in (q, k, v, dout)),
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

    def packed(self, tensors: Sequence[Tensor], ends: Sequence[int]) -> AttentionOut:
        """Documents of one packed sequence, q, k and v [T, N, D], each causal in itself."""
        answer = operators.fusion_attention(*tensors, self._packed_call(tensors[0], ends))
        self._drawn.append(answer.drawn)
        return answer

    def packed_backward(
        self,
        tensors: Sequence[Tensor],
        out: Tensor,
        softmax: tuple[Tensor, Tensor],
        ends: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, which come with dout."""
        return operators.fusion_attention_grad(
            *tensors,
            self._packed_call(tensors[0], ends),
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
        total: Tensor | None = None
        if spec.bias is not None:
            total = bias_of(spec.bias, part)
        if spec.position_bias is not None:
            slanted = self._slanted(part, q, whole=total is not None)
            total = slanted if total is None else total + slanted
        kind = operators.AFTER_SCALE
        if self._version == 1:
            total, kind = total / spec.scale, operators.BEFORE_SCALE
        given = total.to(q.dtype).clamp_min(self._hidden_bias(q.dtype))
        return Bias(_for_every_head(given, q, part).contiguous(), kind)

    def _hidden_bias(self, dtype: torch.dtype) -> float:
        """What stands for -inf: where every key of a query in a call has that, the operator would
        take -inf from -inf. Finite after the scale too."""
        return torch.finfo(dtype).min / (2 * max(self._spec.scale, 1.0))

    def _hidden_score(self, dtype: torch.dtype) -> float:
        """The score of a key that is hidden so, but for the product of query and key."""
        return self._hidden_bias(dtype) * (self._spec.scale if self._version == 1 else 1.0)

    def _takes_slopes(self, part: Rectangle) -> bool:
        """Its own biases of positions want as many keys as queries."""
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
        """A bias of positions written out, [1, N, S, J]; its last rows alone where the operator
        can tell the others from them."""
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
    """Let the operator draw from the spec's seed, and leave the device's generator as it was."""
    if dropout is None:
        yield
        return
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.npu.default_generators[device.index or 0]
    )
    before = generator.get_state()
    generator.manual_seed(dropout.seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _for_every_head(bias: Tensor, q: Tensor, part: Rectangle) -> Tensor:
    """[B, N, S, J], [1, N, S, J] or [B, N, 1, J], as the operator wants it."""
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
    """Back to [S, B, N, D]."""
    sequence, batch, heads, width = shape_SBND
    if layout == "SBH":
        return x.view(sequence, batch, heads, width)
    if layout == "BNSD":
        return x.permute(2, 0, 1, 3)
    return x.view(batch, sequence, heads, width).transpose(0, 1)


def log_sum_exp(answer: AttentionOut) -> Tensor:
    """[B, N, S], or [T, N]."""
    return answer.softmax_max[..., 0] + answer.softmax_sum[..., 0].log()


def statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """(largest score, sum of exponentials) in the operator's shape, of the same probabilities."""
    shape = (*lse.shape, operators.STATISTICS_WIDTH)
    largest = lse.unsqueeze(-1).expand(shape).contiguous()
    return largest, torch.ones_like(largest)
