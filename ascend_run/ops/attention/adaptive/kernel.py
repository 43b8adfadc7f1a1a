"""An attention kernel around another: ranks send each other the keys that the mask asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.blockwise_attention import learned_bias
from ascend_run.ops.attention.ring_attention.bias import Bias
from ascend_run.ops.attention.ring_attention.cut import Cut, Span
from ascend_run.ops.attention.ring_attention.inner import (
    Spec,
    block_backward,
    block_spec,
    by_block,
    lacking,
)
from ascend_run.ops.attention.ring_attention.sums import (
    Attended,
    KeySums,
    RowSums,
    sink_gradient,
    sum_dtype,
)
from ascend_run.ops.transfer.ring import Packing, Passing, connect, post

from .work import Step, Work, adaptive_work

# P ranks; s positions of one; B micro-batch; N query heads, G key-value heads; D width of q and k,
# E width of v. Packed: no B.

_GRADIENTS = 1
"""The tag of gradients on their way home, beside which keys and values travel."""

_MOST_BLOCKS = 2**20
"""Of one step; there are as many as documents."""


class AdaptiveAttention:
    """plugin_api's AttentionKernel on this rank's chunks of the sequence, [s, B, N, D].

    Forward: while a rank attends to the keys that it has, those of the next round come in, and
    its own go to whom the round says. What the parts give is merged by their log-sum-exps.
    Backward sends the keys and values again, the last round first; the sums for what a round
    brought go back to where it came from while the next one is computed, and are added there in
    that order.

    Args:
        inner: Its backward takes the output and log-sum-exp that it is given for those of the
            whole softmax; see ``lacking``.
        group: Ranks that share a sequence.

    Messages: in forward at most one sent and one received in each round; in backward as many, and
    those of the sums the other way; before the first, once, a number of all ranks.
    Numerics: sums over blocks are float32, or float64 for float64 inputs, in a fixed order.
    Source: the rounds are MindSpeed's adaptive context parallelism; to send the keys that are seen,
    and no whole parts, is ours.
    """

    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(self, inner: Any, group: dist.ProcessGroup, cut: Cut) -> None:
        assert not lacking(inner), "see lacking"
        self.inner, self.group, self.cut = inner, group, cut
        self._is_connected = group.size() == 1
        self.features = attrs.evolve(inner.features, sinks=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if not self._is_connected:  # a round may leave ranks out
            connect(self.group, q.device)
            self._is_connected = True
        steps, bias = self._planned(spec, q, k)
        attended = Attended(q, v.shape[-1])
        inner_saved: list[Tensor] = []
        keys, values = k, v
        for number, step in enumerate(steps):
            coming = _Coming(steps[number + 1], k, v, self.group) if step is not steps[-1] else None
            for index, block in enumerate(step.blocks):
                out, lse, saved = self.inner.forward(
                    q[block.rows],
                    keys[block.columns],
                    values[block.columns],
                    self._block_spec(spec, steps, number, index, bias),
                )
                inner_saved += saved
                attended.add(block, out, lse)
            if coming is not None:
                keys, values = coming.wait()
        out, lse = attended.result(spec.sinks)
        return out, lse, tuple(inner_saved)

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
        assert k is not None
        assert v is not None
        assert out is not None
        assert lse is not None
        steps, bias = self._planned(spec, q, k)
        inner_saved = by_block(saved, [step.blocks for step in steps])
        row_sums, own = RowSums(q), Packing([k.shape, v.shape])
        total: Tensor | None = None
        going: _Going | None = None
        order = [0, *reversed(range(1, len(steps)))]
        keys, values = k, v
        for turn, number in enumerate(order):
            step = steps[number]
            last = turn + 1 == len(order)
            coming = None if last else _Coming(steps[order[turn + 1]], k, v, self.group)
            packing = Packing([keys.shape, values.shape])
            key_sums = KeySums(packing, q)
            for index, block in enumerate(step.blocks):
                dq, dk, dv, *dbias = block_backward(
                    self.inner,
                    block,
                    (dout, q, out, lse),
                    keys[block.columns],
                    values[block.columns],
                    inner_saved[number, index],
                    self._block_spec(spec, steps, number, index, bias),
                )
                if learned_bias(spec) is not None:
                    bias.add(number, block, *dbias)
                row_sums.add(block, dq)
                key_sums.add(block, dk, dv)
            sums = key_sums.onto(None)
            if total is None:
                total = sums
            else:
                if going is not None:
                    going.arrive(own.views(total))
                going = _Going(step, sums, k, v, self.group)
            if coming is not None:
                keys, values = coming.wait()
        assert total is not None
        if going is not None:
            going.arrive(own.views(total))
        dk, dv = (x.to(q.dtype) for x in own.views(total))
        extras = [] if learned_bias(spec) is None else [bias.gradient()]
        if spec.sinks is not None:
            extras.append(sink_gradient(dout, out, lse, spec.sinks))
        return (row_sums.result(), dk, dv, *extras)

    def _planned(self, spec: Spec, q: Tensor, k: Tensor) -> tuple[tuple[Step, ...], Bias | None]:
        """The mask speaks of the whole sequence, wherever the caller says that this part begins."""
        rank, size = self.group.rank(), self.group.size()
        lengths = q.shape[0] * size, k.shape[0] * size
        work: Work = adaptive_work(
            spec.mask, self.cut, *lengths, rank, size, spec.position_bias is not None
        )
        if spec.bias is None:
            return work.steps, None
        return work.steps, Bias(spec.bias, work.queries, lambda step: work.steps[step].keys)

    def _block_spec(
        self, spec: Spec, steps: Sequence[Step], number: int, index: int, bias: Bias | None
    ) -> Spec:
        block, rank, size = steps[number].blocks[index], self.group.rank(), self.group.size()
        seed = 0 if spec.dropout is None else spec.dropout.seed
        place = ((seed * size + rank) * size + number) * _MOST_BLOCKS + index
        return block_spec(spec, block, place, None if bias is None else bias.of(number, block))


class _Coming:
    """Keys and values of a round on their way here, and this rank's own on theirs.

    Args:
        k, v: This rank's, [s, B, G, D] and [s, B, G, E].
    """

    def __init__(self, step: Step, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> None:
        there = _packing(step.num_sent, k, v)
        flat = k.new_empty(there.numel)
        for place, own in zip(there.views(flat), (k, v), strict=True):
            for (start, end), (first, last) in zip(_beside(step.places), step.places, strict=True):
                place[start:end].copy_(own[first:last])
        self._packing = _packing(step.num_received, k, v)
        received = k.new_empty(self._packing.numel)
        to = None if step.sent is None else step.sent.target
        source = None if step.received is None else step.received.source
        self._passing = post((flat, to), (received, source), group)

    def wait(self) -> list[Tensor]:
        """As many as come in this round."""
        return self._packing.views(self._passing.wait())


class _Going:
    """The sums for what a round brought on their way home, and the others' for this rank's own."""

    def __init__(
        self, step: Step, sums: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
    ) -> None:
        self._places, self._packing = step.places, _packing(step.num_sent, k, v)
        received = k.new_empty(self._packing.numel, dtype=sum_dtype(k))
        to = None if step.received is None else step.received.source
        source = None if step.sent is None else step.sent.target
        self._passing: Passing = post((sums, to), (received, source), group, tag=_GRADIENTS)

    def arrive(self, totals: Sequence[Tensor]) -> None:
        """Added to the gradients of this rank's keys and values."""
        for total, came in zip(totals, self._packing.views(self._passing.wait()), strict=True):
            for (start, end), (first, last) in zip(
                _beside(self._places), self._places, strict=True
            ):
                total[first:last].add_(came[start:end])


def _packing(length: int, k: Tensor, v: Tensor) -> Packing:
    return Packing([(length, *k.shape[1:]), (length, *v.shape[1:])])


def _beside(spans: Sequence[Span]) -> list[Span]:
    """Where they lie once they are one after the other."""
    found, place = [], 0
    for start, end in spans:
        found.append((place, place + end - start))
        place += end - start
    return found
