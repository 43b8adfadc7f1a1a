"""Cost of the keys that ranks send each other, by formula. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from ascend_run.types.attention import Mask
from ascend_run.types.cost import Phase, PipelineStage, SavedChange, WorkingMemory

from .head_cost import Sent
from .options import KvCache
from .plan import ContextParallelPlan
from .rounds import exchange_rounds

SUM_BYTES: Final = 4
"""Bytes of one element of an accumulated gradient."""
_FORWARD: Final = "self_attention, forward: keys and values"
_BACKWARD: Final = "self_attention, backward: keys and values"
_VALUES: Final = "self_attention, backward: values"
_SUMS: Final = "self_attention, backward: gradients of keys and values"
_GATHERED: Final[Mapping[str, tuple[str, ...]]] = {"none": (), "half": ("k",), "full": ("k", "v")}
"""Policy -> which tensors of the full sequence are saved in place of a rank's own."""


@attrs.frozen(kw_only=True)
class KeyCost:
    """Cost on one of the P / U ranks that attend to each other's keys."""

    plan: ContextParallelPlan
    rank: PipelineStage
    groups: int
    """Key-value heads that each rank attends with."""
    factor: float
    """Bytes of the keys that a rank holds before the first receive, relative to its own part."""
    keeping: tuple[int, ...]
    """Layers that save any received keys or values."""

    @property
    def own_bytes(self) -> dict[str, float]:
        """Bytes of the keys and of the values that a rank holds."""
        rank, degree = self.rank, self.plan.head_degree or 1
        rows = rank.tokens * degree * self.groups * rank.item_bytes
        values = rows * rank.value_width
        return {"k": 2 * rows * rank.head_width - values, "v": values}

    @property
    def received_bytes(self) -> float:
        """Bytes saved of all ranks' keys and values, in layers that save any."""
        kv_cache, own, size = self._policy, self.own_bytes, self.plan.ring_degree
        if self.plan.keys == "ring":
            return (size + 1 if kv_cache == "half" else 2 * size) * sum(own.values()) / 2
        return size * sum(own[name] for name in _GATHERED[kv_cache])

    def saved(self) -> Iterator[SavedChange]:
        """Yield changes of a rank's own saved keys and values, which layers that save received ones
        store among those."""
        among = ("k", "v") if self.plan.keys == "ring" else _GATHERED[self._policy]
        for name in ("k", "v"):
            inside = self.keeping if name in among else ()
            others = tuple(i for i in self.rank.layers if i not in inside)
            for layers, factor in ((inside, 0.0), (others, self.factor)):
                if layers and factor != 1:
                    tensors = (f"self_attention.{name}",)
                    yield SavedChange(tensors=tensors, layers=layers, factor=factor)

    def working(self) -> Iterator[WorkingMemory]:
        """Yield the gathered buffers: of one part of the heads, and of the next, which is received
        meanwhile."""
        share = min(self.plan.groups_at_once or self.groups, self.groups) / self.groups
        whole = self.plan.ring_degree * sum(self.own_bytes.values())
        held = whole * share * min(2, self._num_parts)
        more = {Phase.FORWARD: 0.0, Phase.BACKWARD: SUM_BYTES / self.rank.item_bytes}
        for phase, sums in more.items():
            nbytes = held * (1 + sums)
            yield WorkingMemory(part="self_attention", name="gathered", nbytes=nbytes, phase=phase)

    def sent(self, mask: Mask, seq_length: int, rows: int) -> Iterator[tuple[int, Sent]]:
        """Yield (passes of a layer, what is sent in one).

        Args:
            mask: Mask of a sequence. A mask may end a ring early; the full ring is counted.
            rows: Samples of a micro-batch.
        """
        passes = self.rank.layer_passes
        if self.plan.keys == "mask":
            yield from ((passes, sent) for sent in self._of_most(mask, seq_length, rows))
            return
        keeping = len(self.keeping) * self.rank.num_microbatches
        of_pass = self._round if self.plan.keys == "ring" else self._gathered
        yield from ((passes - keeping, sent) for sent in of_pass("none"))
        yield from ((keeping, sent) for sent in of_pass(self._policy))

    def _round(self, kv_cache: KvCache) -> Iterator[Sent]:
        """Yield the sends within windows and between them; assumes equal widths of keys and
        values."""
        window = self.plan.window or self.plan.ring_degree
        windows = self.plan.ring_degree // window
        both = sum(self.own_bytes.values())
        back = {"none": [(_BACKWARD, both)], "half": [(_VALUES, both / 2)], "full": []}
        sums = both * SUM_BYTES / self.rank.item_bytes
        hops_of = windows * (window - 1), windows - 1
        for group, hops in zip(self.plan.key_groups, hops_of, strict=False):
            if hops:
                for why, nbytes in ((_FORWARD, both), *back[kv_cache], (_SUMS, sums)):
                    yield Sent(why, hops, hops * nbytes, group)

    def _gathered(self, kv_cache: KvCache) -> Iterator[Sent]:
        own, parts = self.own_bytes, self._num_parts
        both = sum(own.values())
        again = sum(own[name] for name in own if name not in _GATHERED[kv_cache])
        sums = self.plan.ring_degree * both * SUM_BYTES / self.rank.item_bytes
        (group,) = self.plan.key_groups
        yield Sent(_FORWARD, parts, both, group, "all_gather")
        if again:
            yield Sent(_BACKWARD, parts, again, group, "all_gather")
        # The last reduce-scatter overlaps with nothing; all-gathers overlap with the rank's own
        # block.
        yield Sent(_SUMS, parts, sums, group, "reduce_scatter", overlapped=parts > 1)

    def _of_most(self, mask: Mask, seq_length: int, rows: int) -> list[Sent]:
        """Return the sends of the rank that sends most."""
        rank, size = self.rank, self.plan.ring_degree
        key_bytes = rows * self.groups * 2 * rank.head_width * rank.item_bytes
        sums = max(rank.item_bytes, SUM_BYTES) / rank.item_bytes
        rounds = exchange_rounds(mask, self.plan.partition, seq_length, seq_length, size)
        transfers = [transfer for of_round in rounds for transfer in of_round]
        (group,), found = self.plan.key_groups, []
        for place in range(size):
            sent = [m.num_keys for m in transfers if m.source == place]
            taken = [m.num_keys for m in transfers if m.target == place]
            kinds = (
                (_FORWARD, sent, key_bytes),
                (_BACKWARD, sent, key_bytes),
                (_SUMS, taken, sums * key_bytes),
            )
            found.append(
                [
                    Sent(why, len(keys), nbytes * sum(keys), group, largest=nbytes * max(keys))
                    for why, keys, nbytes in kinds
                    if keys
                ]
            )
        return max(found, key=lambda kinds: sum(sent.nbytes for sent in kinds))

    @property
    def _policy(self) -> KvCache:
        return self.plan.kv_cache.kv_cache

    @property
    def _num_parts(self) -> int:
        return math.ceil(self.groups / (self.plan.groups_at_once or self.groups))
