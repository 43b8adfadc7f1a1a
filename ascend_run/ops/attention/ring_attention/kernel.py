"""An attention kernel around another: keys and values go round a ring of ranks, queries stay."""

from __future__ import annotations

import math
from typing import Any

import attrs
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.blockwise_attention import learned_bias
from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.ops.transfer.ring import Packing, Passing, pass_on

from .bias import Bias
from .blocks import Block, holder, ring_steps
from .cut import Cut
from .inner import Spec, block_backward, block_spec, by_block, lacking
from .received import Received
from .sums import Attended, KeySums, RowSums, sink_gradient

# P ranks of all windows, W of one; s positions of one rank; B micro-batch; N query heads, G
# key-value heads; D width of q and k, E width of v. Packed: no B.

_GRADIENTS = 1
"""The tag of the ring of gradients, which turns beside that of keys and values."""

_MOST_BLOCKS = 2**16
"""Of one step; there are as many as documents."""


class RingAttention:
    """plugin_api's AttentionKernel on this rank's chunks of the sequence, [s, B, N, D].

    Forward: while a rank attends to the keys that it holds, they travel to the next rank of its
    window and those of the rank before come in; and those that it held first in this window travel
    to the next window meanwhile, however long the window takes. What the parts give is merged by
    their log-sum-exps. Backward goes the other way round, from the keys held last: the gradients of
    each part follow from the merged output and log-sum-exp. In a window, the sums for a block of
    keys travel one step behind it, and end where it was held first; from there they go to the next
    window while that one sums for itself. So both are home at the last step.

    Args:
        inner: Its backward takes the output and log-sum-exp that it is given for those of the
            whole softmax; see ``lacking``.
        group: The ranks of one window, neighbours in the sequence.
        windows: The ranks in the same place of every window; None where there is but one window,
            which is the plain ring.
        kv_cache: See ``Received``.

    Numerics: sums over blocks are float32, or float64 for float64 inputs, in a fixed order.
    Source: arXiv:2310.01889; windows: arXiv:2406.18485; a backward that begins where forward ended
    is MindSpeed's. Sums that cross windows once, and not in single steps, are ours.
    """

    backward_reads = frozenset({"q", "out", "lse"})

    def __init__(
        self,
        inner: Any,
        group: dist.ProcessGroup,
        cut: Cut,
        *,
        windows: dist.ProcessGroup | None = None,
        kv_cache: KvCache = "none",
    ) -> None:
        assert not lacking(inner), "see lacking"
        self.inner, self.group, self.windows = inner, group, windows
        self.cut, self.kv_cache = cut, kv_cache
        self.features = attrs.evolve(inner.features, sinks=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        steps = self._steps(spec, q.shape[0], k.shape[0])
        bias = self._bias(spec, q.shape[0], k.shape[0])
        packing = Packing([k.shape, v.shape])
        received = Received(self.kv_cache, num_keys=k.numel(), num_steps=len(steps))
        attended = Attended(q, v.shape[-1])
        inner_saved: list[Tensor] = []
        held = packing.pack([k, v])
        next_window: Passing | None = None
        for step, blocks in enumerate(steps):
            place = step % self.group.size()
            if place == 0 and step + self.group.size() < len(steps):
                assert self.windows is not None
                next_window = pass_on(held, self.windows)
            more = place < self.group.size() - 1 and step < len(steps) - 1
            coming = pass_on(held, self.group) if more else None
            received.add(held)
            held_k, held_v = packing.views(held)
            for index, block in enumerate(blocks):
                keys, values = held_k[block.columns], held_v[block.columns]
                block_spec = self._block_spec(spec, block, step, index, bias)
                part, part_lse, part_saved = self.inner.forward(
                    q[block.rows], keys, values, block_spec
                )
                inner_saved += part_saved
                attended.add(block, part, part_lse)
            if place == self.group.size() - 1:
                coming, next_window = next_window, None
            held = coming.wait() if coming else held
        # Backward sees no k and no v, but must know their shapes.
        shape_carrier = k.new_empty((*k.shape[:-1], 0))
        out, lse = attended.result(spec.sinks)
        return out, lse, (shape_carrier, *received.tensors(), *inner_saved)

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
        key_shape = (*shape_carrier.shape[:-1], q.shape[-1])
        value_shape = (*shape_carrier.shape[:-1], dout.shape[-1])
        steps = self._steps(spec, q.shape[0], key_shape[0])
        bias = self._bias(spec, q.shape[0], key_shape[0])
        packing = Packing([key_shape, value_shape])
        received = Received(
            self.kv_cache, num_keys=math.prod(key_shape), num_steps=len(steps), saved=tuple(rest)
        )
        inner_saved = by_block(rest[received.num_tensors :], steps)
        row_sums = RowSums(q)
        next_window: Passing | None = None
        sums_coming: Passing | None = None
        window_sums: Passing | None = None
        for step in reversed(range(len(steps))):
            place, moving = step % self.group.size(), received.moving
            enters = place == self.group.size() - 1 and step >= self.group.size()
            if enters and moving is not None:
                assert self.windows is not None
                next_window = pass_on(moving, self.windows, by=-1)
            coming = pass_on(moving, self.group, by=-1) if place and moving is not None else None
            held_k, held_v = packing.views(received.at(step))
            key_sums = KeySums(packing, q)
            for index, block in enumerate(steps[step]):
                dq, dk, dv, *dbias = block_backward(
                    self.inner,
                    block,
                    (dout, q, out, lse),
                    held_k[block.columns],
                    held_v[block.columns],
                    inner_saved[step, index],
                    self._block_spec(spec, block, step, index, bias),
                )
                if learned_bias(spec) is not None:
                    bias.add(step, block, *dbias)
                row_sums.add(block, dq)
                key_sums.add(block, dk, dv)
            total = key_sums.onto(sums_coming.wait() if sums_coming else None)
            if place:
                sums_coming = pass_on(total, self.group, by=-1, tag=_GRADIENTS)
            else:
                sums_coming = None
                if window_sums:
                    total += window_sums.wait()
                if step:
                    assert self.windows is not None
                    window_sums = pass_on(total, self.windows, by=-1, tag=_GRADIENTS)
            if not place:
                coming, next_window = next_window, None
            received.moving = coming.wait() if coming else moving
        dk, dv = (sums.to(q.dtype) for sums in packing.views(total))
        extras = [] if learned_bias(spec) is None else [bias.gradient()]
        if spec.sinks is not None:
            extras.append(sink_gradient(dout, out, lse, spec.sinks))
        return (row_sums.result(), dk, dv, *extras)

    def _steps(self, spec: Spec, num_queries: int, num_keys: int) -> tuple[tuple[Block, ...], ...]:
        """The mask speaks of the whole sequence, wherever the caller says that this part begins."""
        window, (rank, size) = self.group.size(), self._rank_and_size()
        mask = attrs.evolve(spec.mask, query_start=0, key_start=0)
        placed = spec.position_bias is not None
        lengths = num_queries * size, num_keys * size
        return ring_steps(mask, self.cut, *lengths, rank, size, window, placed)

    def _bias(self, spec: Spec, num_queries: int, num_keys: int) -> Bias | None:
        """Like the mask, it speaks of the whole sequence."""
        if spec.bias is None:
            return None
        rank, size = self._rank_and_size()
        cut, ends = self.cut, spec.mask.document_ends
        if ends:
            cut = cut.of_documents(ends)
        window = self.group.size()
        return Bias(
            spec.bias,
            cut.chunks(num_queries * size, rank, size),
            lambda step: cut.chunks(num_keys * size, holder(rank, step, size, window), size),
        )

    def _rank_and_size(self) -> tuple[int, int]:
        """Among the ranks of all windows."""
        rank, size = self.group.rank(), self.group.size()
        if self.windows is None:
            return rank, size
        return rank + self.windows.rank() * size, size * self.windows.size()

    def _block_spec(
        self, spec: Spec, block: Block, step: int, index: int, bias: Bias | None
    ) -> Spec:
        rank, size = self._rank_and_size()
        seed = 0 if spec.dropout is None else spec.dropout.seed
        place = ((seed * size + rank) * size + step) * _MOST_BLOCKS + index
        return block_spec(spec, block, place, None if bias is None else bias.of(step, block))
