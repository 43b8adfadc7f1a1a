"""Cost of the head all-to-all on one rank, by formula. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs

from ascend_run.ops.attention.head_shares import HeadShare, head_shares
from ascend_run.types.cost import PipelineStage, SavedChange

from .options import KvCache
from .plan import ContextParallelPlan

_LSE_BYTES: Final = 4


@attrs.frozen
class Sent:
    """Collectives or sends of one kind, by one rank in one pass of a layer."""

    why: str
    calls: float
    nbytes: float
    """Total of all calls."""
    group: str
    """One of the plan's ``group_names``."""
    operation: str = "send"
    overlapped: bool = True
    """Whether they overlap with the computation."""
    largest: float = 0.0
    """Bytes of the largest call; 0: all are equal."""


@attrs.frozen(kw_only=True)
class HeadCost:
    """Cost on one rank."""

    plan: ContextParallelPlan
    rank: PipelineStage
    share: HeadShare
    sent_groups: int
    """Key-value heads summed over ranks; one that several ranks need counts for each."""
    held: float
    """Positions of this rank times the micro-batch size."""
    whole: float

    @classmethod
    def of(
        cls, plan: ContextParallelPlan, rank: PipelineStage, seq_length: int, rows: int
    ) -> HeadCost:
        """Compute the cost; with an uneven partition, that of the rank that sends most.

        Args:
            rows: Samples of a micro-batch.
        """
        size, uneven = plan.head_degree or 1, plan.partition.multiple == 0
        held: list[float] = [rank.tokens] * size
        if uneven:
            chunks = (plan.partition.chunks(seq_length, place, size) for place in range(size))
            held = [rows * sum(stop - start for start, stop in spans) for spans in chunks]
        shares = head_shares(rank.heads, rank.query_groups, size)
        found = [
            cls(
                plan=plan,
                rank=rank,
                share=share,
                sent_groups=sum(each.num_groups for each in shares),
                held=of_rank,
                whole=sum(held),
            )
            for share, of_rank in zip(shares, held, strict=True)
        ]
        return (
            max(found, key=lambda one: sum((*one.forward, *one.backward("full"))))
            if uneven
            else found[0]
        )

    @property
    def forward(self) -> tuple[float, float]:
        """Bytes of both all-to-alls of a forward pass; without keys and values if these are
        all-gathered."""
        rank, exchanged = self.rank, not self.plan.gathers_heads
        there = self.held * (rank.heads + 2 * self.sent_groups * exchanged) * self._row
        return there, self.whole * self.share.num_queries * (self._row + _LSE_BYTES)

    def backward(self, kv_cache: KvCache) -> tuple[float, float]:
        """Return the bytes of both all-to-alls of a backward pass, including the keys and values
        not saved."""
        again = self.sent_groups * self._again(kv_cache) * (not self.plan.gathers_heads)
        back = self.whole * (self.share.num_queries + 2 * self.share.num_groups) * self._row
        return self.held * (self.rank.heads * self._row + again), back

    @property
    def key_factor(self) -> float:
        """Bytes of the keys that a rank attends to, relative to its own keys."""
        own = self.rank.tokens * self.rank.query_groups
        return self.whole * self.share.num_groups / own

    def saved(self) -> Iterator[SavedChange]:
        """Yield changes of saved activations: full sequence and fewer heads take as many bytes,
        except with uneven partitions or key-value heads that several ranks need."""
        rank, policy = self.rank, self.plan.kv_cache.kv_cache_of
        queries = self.whole * self.share.num_queries / (rank.tokens * rank.heads)
        if queries != 1:
            for name in ("q", "out", "lse"):
                yield SavedChange(tensors=(f"self_attention.{name}",), factor=queries)
        for name, kept_by in (("k", ("half", "full")), ("v", ("full",))):
            layers = tuple(i for i in rank.layers if policy(i) in kept_by)
            if layers and self.key_factor != 1:
                tensors = (f"self_attention.{name}",)
                yield SavedChange(tensors=tensors, layers=layers, factor=self.key_factor)

    def sent(self) -> Iterator[tuple[int, Sent]]:
        """Yield (passes of a layer, what is sent in one). If keys are routed further, that route
        handles the saved ones."""
        alone, group = self.plan.keys == "heads", self.plan.head_group
        policies = [
            self.plan.kv_cache.kv_cache_of(i) if alone else "full" for i in self.rank.layers
        ]
        forward, backward = "self_attention, forward", "self_attention, backward"
        heads, keys = "heads for sequence", "keys and values"
        for kv_cache in dict.fromkeys(policies):
            kinds: list[tuple[str, tuple[float, ...], str]] = [
                ("all_to_all", self.forward, f"{forward}: {heads}"),
                ("all_to_all", self.backward(kv_cache), f"{backward}: {heads}"),
            ]
            if self.plan.gathers_heads:
                again = self.held * self._again(kv_cache)
                kinds += [
                    ("all_gather", (self.held * 2 * self._row,), f"{forward}: {keys}"),
                    ("all_gather", (again,), f"{backward}: {keys}"),
                ]
            passes = policies.count(kv_cache) * self.rank.num_microbatches
            for operation, each, why in kinds:
                if nbytes := sum(each):
                    largest = max(each)
                    yield passes, Sent(why, len(each), nbytes, group, operation, False, largest)

    @property
    def _row(self) -> float:
        """Bytes of one head at one position: half of a key and a value, and of a query and its
        output."""
        return self.rank.head_width * self.rank.item_bytes

    def _again(self, kv_cache: KvCache) -> float:
        """Return the bytes of one head at one position that are sent again in backward."""
        value = self.rank.value_width * self.rank.item_bytes
        return {"full": 0.0, "half": value, "none": 2 * self._row}[kv_cache]
