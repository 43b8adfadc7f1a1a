"""An attention kernel around another: every rank gathers all keys and values, queries stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.blockwise_attention import learned_bias
from ascend_run.ops.attention.kv_cache import KvCache

from .bias import Bias
from .cut import Cut
from .gathered_blocks import GatheredBlock, Work, gathered_work
from .gathered_keys import GatheredKeys, GatheredSums
from .head_parts import head_parts, joined, joined_bias
from .inner import Spec, block_backward, block_spec, lacking
from .sums import Attended, RowSums, sink_gradient

# P ranks; s positions of one; B micro-batch; N query heads, G key-value heads; D width of q and k,
# E width of v; T keys of a block. Packed: no B.

_MOST_BLOCKS = 2**20
"""Of one call; there are as many as documents, for each part of the heads."""


class GatheredAttention:
    """plugin_api's AttentionKernel on this rank's chunks of the sequence, [s, B, N, D].

    Forward: while a rank attends to its own keys, those of all others come in; then it attends to
    the part of them that its mask lets it see, and both are merged by their log-sum-exps. Backward
    gathers again what was not kept, and adds up the gradients for the keys of every rank, which go
    home in sums. Heads may be taken in parts: the keys of the next part then come in, and the sums
    of the one before go home, while one part is computed.

    Args:
        inner: Its backward takes the output and log-sum-exp that it is given for those of the
            whole softmax; see ``lacking``.
        group: Ranks that share a sequence.
        groups_at_once: Key-value heads of one part; None is all of them.
        kv_cache: What of the others' keys and values is kept for backward.

    Messages: forward one all-gather a part; backward one, unless both are kept, and one
    reduce-scatter. Numerics: sums over blocks are float32, or float64 for float64 inputs.
    Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2. Attending to a rank's own
    keys meanwhile, and heads in parts, are ours.
    """

    def __init__(
        self,
        inner: Any,
        group: dist.ProcessGroup,
        cut: Cut,
        *,
        groups_at_once: int | None = None,
        kv_cache: KvCache = "none",
    ) -> None:
        assert not lacking(inner), "see lacking"
        self.inner, self.group, self.cut = inner, group, cut
        self.groups_at_once, self.kv_cache = groups_at_once, kv_cache
        self.features = attrs.evolve(inner.features, sinks=True)
        own = {"none": {"k", "v"}, "half": {"v"}, "full": set[str]()}[kv_cache]
        self.backward_reads = frozenset({"q", "out", "lse"} | own)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        work, number = self._work(spec, q.shape[0], k.shape[0]), count()
        parts = head_parts(q.shape[-2], k.shape[-2], self.groups_at_once)
        gathered = GatheredKeys([[p.of_groups(k), p.of_groups(v)] for p in parts], self.group)
        outs, lses = [], []
        kept, inner_saved = list[Tensor](), list[Tensor]()
        for index, part in enumerate(parts):
            part_q, part_spec = part.of_heads(q), part.of_spec(spec)
            attended, bias = Attended(part_q, v.shape[-1]), _bias(part_spec, work)
            for step, found, keys, values in self._in_turn(work, gathered, index):
                block = found.block
                given = self._block_spec(part_spec, step, found, next(number), bias)
                out, lse, saved = self.inner.forward(part_q[block.rows], keys, values, given)
                inner_saved += saved
                attended.add(block, out, lse)
            out, lse = attended.result(part_spec.sinks)
            outs.append(out)
            lses.append(lse)
            kept += gathered.keep(self.kv_cache)
        # Backward may see no k and no v, but must know their shapes.
        shape_carrier = k.new_empty((*k.shape[:-1], 0))
        return joined(outs), joined(lses), (shape_carrier, *kept, *inner_saved)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: Spec,
    ) -> tuple[Tensor, ...]:
        assert q is not None
        assert out is not None
        assert lse is not None
        shape_carrier, *rest = saved
        length, *batch, groups, _ = shape_carrier.shape
        parts = head_parts(q.shape[-2], groups, self.groups_at_once)
        work, number = self._work(spec, q.shape[0], length), count()
        widths = q.shape[-1], dout.shape[-1]
        shapes = [[(length, *batch, p.end - p.first, width) for width in widths] for p in parts]
        kept = rest[: 0 if self.kv_cache == "none" else len(parts)]
        inner_saved = rest[len(kept) :]
        each = len(inner_saved) // max(1, len(parts) * work.num_blocks)
        gathered = GatheredKeys(
            [[p.of_groups(x) for x in (k, v) if x is not None] for p in parts],
            self.group,
            kept=kept,
            shapes=[of_part[: 1 if self.kv_cache == "half" else 2] for of_part in shapes if kept],
        )
        sums = GatheredSums(self.group)
        dqs, dbiases = [], list[Tensor]()
        for index, part in enumerate(parts):
            part_q, part_out, part_lse, part_dout = map(part.of_heads, (q, out, lse, dout))
            part_spec = part.of_spec(spec)
            bias, row_sums = _bias(part_spec, work), RowSums(part_q)
            sums.begin(shapes[index], part_q)
            for step, found, keys, values in self._in_turn(work, gathered, index):
                block, place = found.block, next(number)
                dq, dk, dv, *dbias = block_backward(
                    self.inner,
                    block,
                    (part_dout, part_q, part_out, part_lse),
                    keys,
                    values,
                    tuple(inner_saved[place * each : (place + 1) * each]),
                    self._block_spec(part_spec, step, found, place, bias),
                )
                if learned_bias(part_spec) is not None:
                    bias.add(step, block, *dbias)
                row_sums.add(block, dq)
                sums.add(found.sources, dk, dv)
            sums.send()
            dqs.append(row_sums.result())
            if learned_bias(part_spec) is not None:
                dbiases.append(bias.gradient())
        dk, dv = (joined(gradients).to(q.dtype) for gradients in sums.result())
        learned = learned_bias(spec)
        extras = [] if learned is None else [joined_bias(dbiases, learned)]
        if spec.sinks is not None:
            extras.append(sink_gradient(dout, out, lse, spec.sinks))
        return (joined(dqs), dk, dv, *extras)

    def _work(self, spec: Spec, num_queries: int, num_keys: int) -> Work:
        """The mask speaks of the whole sequence, wherever the caller says that this part begins."""
        rank, size = self.group.rank(), self.group.size()
        lengths = num_queries * size, num_keys * size
        return gathered_work(
            spec.mask, self.cut, *lengths, rank, size, spec.position_bias is not None
        )

    def _in_turn(
        self, work: Work, gathered: GatheredKeys, part: int
    ) -> Iterator[tuple[int, GatheredBlock, Tensor, Tensor]]:
        """Step, block, keys and values: this rank's own, and then all those that have come."""
        own = {self.group.rank(): gathered.own(part)}
        yield from ((0, found, *_together(found, own)) for found in work.own)
        all_ranks = gathered.all(part)
        yield from ((1, found, *_together(found, all_ranks)) for found in work.others)

    def _block_spec(
        self, spec: Spec, step: int, found: GatheredBlock, place: int, bias: Bias | None
    ) -> Spec:
        seed = 0 if spec.dropout is None else spec.dropout.seed
        place += (seed * self.group.size() + self.group.rank()) * _MOST_BLOCKS
        part = None if bias is None else bias.of(step, found.block)
        return block_spec(spec, found.block, place, part)


def _bias(spec: Spec, work: Work) -> Bias | None:
    """Like the mask, it speaks of the whole sequence."""
    if spec.bias is None:
        return None
    keys = work.own_keys, work.other_keys
    return Bias(spec.bias, work.queries, lambda step: keys[step])


def _together(
    found: GatheredBlock, of_rank: Mapping[int, Sequence[Tensor]] | Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor]:
    """A block's keys and its values, [T, B, g, D] and [T, B, g, E]; heads first in memory."""
    runs = [[x[source.rows] for x in of_rank[source.rank]] for source in found.sources]
    if len(runs) == 1:
        return runs[0][0], runs[0][1]
    keys, values = (
        torch.cat([x.movedim(0, -2) for x in which], -2).movedim(-2, 0)
        for which in zip(*runs, strict=True)
    )
    return keys, values
