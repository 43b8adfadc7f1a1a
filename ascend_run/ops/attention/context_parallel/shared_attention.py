"""An attention kernel around another: queries stay, and the keys of all ranks are routed to
them."""

from __future__ import annotations

from typing import Generic, NamedTuple

import attrs
from torch import Tensor

from ascend_run.types.attention import AttentionKernel, AttentionResult, AttentionSpec, Saved

from .bias import Bias
from .head_parts import head_parts, joined, joined_bias
from .inner import block_backward, block_spec, missing_features
from .route import KeyRoute, RankKeys, RoutedBlock, W, Work
from .sums import Attended, RowSums, sink_gradient

# s positions of this rank; B micro-batch (absent in packed layout); N query heads, G key-value
# heads; D width of q and k, E width of v


class SharedSaved(NamedTuple, Generic[Saved]):
    """What backward needs in addition to its inputs."""

    key_shape: tuple[int, ...]
    """[s, B, G, D]."""
    received: tuple[Tensor, ...]
    """What the route saved of other ranks' keys and values."""
    inner: dict[int, Saved]
    """What the inner kernel saved for each block; see ``RoutedBlock.order``."""


class SharedAttention(AttentionKernel[SharedSaved[Saved]], Generic[W, Saved]):
    """AttentionKernel on this rank's chunks of the sequence, [s, B, N, D].

    Merges the blocks' outputs by their log-sum-exps; each block's gradients are computed from the
    merged output and log-sum-exp. A route may split the heads into parts.

    Args:
        inner: Its backward must use the given output and log-sum-exp as those of the full softmax;
            see ``inner.missing_features``.
        route: The KV route.

    Numerics: sums over blocks are float32, or float64 for float64 inputs, in a fixed order.
    """

    def __init__(self, inner: AttentionKernel[Saved], route: KeyRoute[W]) -> None:
        assert not missing_features(inner), "see inner.missing_features"
        self.inner, self.route = inner, route
        self.features = attrs.evolve(inner.features, sinks=True)
        self.backward_reads = frozenset({"q", "out", "lse"}) | route.reads

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[SharedSaved[Saved]]:
        work = self._work(spec, q.shape[0], k.shape[0])
        parts = head_parts(q.shape[-2], k.shape[-2], self.route.groups_at_once)
        keys = RankKeys(
            own=[(p.of_groups(k), p.of_groups(v)) for p in parts],
            shapes=[(p.of_groups(k).shape, p.of_groups(v).shape) for p in parts],
            like=q,
        )
        outs, lses, inner_saved = [], [], {}
        for blocks, part in zip(self.route.forward(work, keys), parts, strict=True):
            part_q, part_spec = part.of_heads(q), part.of_spec(spec)
            attended, bias = Attended(part_q, v.shape[-1]), _bias(part_spec, work)
            for routed in blocks:
                out, lse, inner_saved[routed.order] = self.inner.forward(
                    part_q[routed.block.rows],
                    routed.keys,
                    routed.values,
                    self._block_spec(part_spec, routed, bias),
                )
                attended.add(routed.block, out, lse)
            out, lse = attended.result(part_spec.sinks)
            outs.append(out)
            lses.append(lse)
        saved = SharedSaved(tuple(k.shape), tuple(keys.saved), inner_saved)
        return AttentionResult(joined(outs), joined(lses), saved)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: SharedSaved[Saved],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        assert q is not None
        assert out is not None
        assert lse is not None
        length, *batch, groups, width = saved.key_shape
        work = self._work(spec, q.shape[0], length)
        parts = head_parts(q.shape[-2], groups, self.route.groups_at_once)
        dims = [(length, *batch, p.end - p.first) for p in parts]
        keys = RankKeys(
            own=[[p.of_groups(x) for x in (k, v) if x is not None] for p in parts],
            shapes=[((*shape, width), (*shape, dout.shape[-1])) for shape in dims],
            like=q,
            saved=[*saved.received],
        )
        dqs, dbiases = [], []
        for blocks, part in zip(self.route.backward(work, keys), parts, strict=True):
            of_part = part.of_heads
            rows = of_part(dout), of_part(q), of_part(out), of_part(lse)
            part_spec, row_sums = part.of_spec(spec), RowSums(rows[1])
            bias = _bias(part_spec, work)
            learned = bias if spec.bias_requires_grad else None
            for routed in blocks:
                dq, dk, dv, *dbias = block_backward(
                    self.inner,
                    routed.block,
                    rows,
                    routed.keys,
                    routed.values,
                    saved.inner[routed.order],
                    self._block_spec(part_spec, routed, bias),
                )
                if learned is not None:
                    learned.add(routed.step, routed.block, *dbias)
                row_sums.add(routed.block, dq)
                routed.add(dk, dv)
            dqs.append(row_sums.result())
            if learned is not None:
                dbiases.append(learned.gradient())
        dk, dv = (joined(x).to(q.dtype) for x in zip(*keys.gradients, strict=True))
        extras = [] if spec.bias is None or not dbiases else [joined_bias(dbiases, spec.bias)]
        if spec.sinks is not None:
            extras.append(sink_gradient(dout, out, lse, spec.sinks))
        return (joined(dqs), dk, dv, *extras)

    def _work(self, spec: AttentionSpec, num_queries: int, num_keys: int) -> W:
        """Return the route's work. The mask is that of the full sequence, so its starts are
        ignored."""
        mask = attrs.evolve(spec.mask, query_start=0, key_start=0)
        size, placed = self.route.size, spec.position_bias is not None
        return self.route.work(mask, num_queries * size, num_keys * size, placed)

    def _block_spec(
        self, spec: AttentionSpec, routed: RoutedBlock, bias: Bias | None
    ) -> AttentionSpec:
        seed = 0 if spec.dropout is None else spec.dropout.seed
        of_rank = seed * self.route.size + self.route.rank
        index = of_rank * self.route.max_blocks + routed.order
        part = None if bias is None else bias.of(routed.step, routed.block)
        return block_spec(spec, routed.block, index, part)


def _bias(spec: AttentionSpec, work: Work) -> Bias | None:
    """Return the bias of the full sequence, if there is one."""
    return None if spec.bias is None else Bias(spec.bias, work.queries, work.keys)
