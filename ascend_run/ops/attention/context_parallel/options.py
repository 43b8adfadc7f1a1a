"""Options of context-parallel plugins. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from ascend_run.types.attention import Mask

from .partitions import PARTITIONS, Contiguous, ZigZag
from .remap import Remapped

KvCache = Literal["none", "half", "full"]
"""What is saved and so not sent again: nothing; the keys; keys and values."""


@attrs.frozen(kw_only=True)
class KvCacheOptions:
    """Options of a plugin whose ranks send keys and values to each other."""

    kv_cache: Literal["none", "half", "full"] = "none"
    """Which received keys and values a rank saves for backward: none, the keys (``half``), or both
    (``full``). The others are sent again."""
    kv_cache_every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Save them in one layer of this many, starting with the first. Unit: layers."""

    def kv_cache_of(self, layer_index: int) -> KvCache:
        """Return what a layer saves, by its index in the full model, from 0."""
        return "none" if layer_index % self.kv_cache_every else self.kv_cache

    def caching(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return those of the layers that save anything."""
        return tuple(i for i in layers if self.kv_cache_of(i) != "none")


@attrs.frozen(kw_only=True)
class FullKvCacheOptions(KvCacheOptions):
    """KvCacheOptions of a plugin whose ranks gather the full sequence for some heads."""

    kv_cache: Literal["none", "half", "full"] = "full"
    """Which keys and values of the full sequence a rank saves for backward: none, the keys
    (``half``), or both (``full``). The others are gathered again from each rank's own."""


def kv_cache_problems(plugin: str, options: KvCacheOptions, num_layers: int) -> Iterator[str]:
    """Yield a message for each option value that has no effect.

    Args:
        plugin: The name of the plugin whose options these are.
    """
    every = options.kv_cache_every
    named = f"{plugin}: plugins.{plugin}.kv_cache_every={every}"
    if every > num_layers:
        yield f"{named} is more than model.num_layers={num_layers}; use at most {num_layers}"
    if every > 1 and options.kv_cache == "none":
        yield (
            f"{named} has no effect: plugins.{plugin}.kv_cache=none saves nothing in any layer; "
            "set kv_cache to half or full, or remove kv_cache_every"
        )


@attrs.frozen(kw_only=True)
class SharedSequenceOptions(KvCacheOptions):
    """How a sequence is partitioned, and what is saved of received keys and values."""

    cut: Literal["zig-zag", "contiguous"] = "zig-zag"
    """How the sequence is partitioned: ``zig-zag`` gives each rank an early and a late chunk (of
    every document, if documents are known), which balances work under a causal mask; ``contiguous``
    gives each rank one chunk."""

    @property
    def partition(self) -> ZigZag | Contiguous:
        """The SequencePartition named by ``cut``."""
        return PARTITIONS[self.cut]


@attrs.frozen(kw_only=True)
class AdaptiveOptions:
    """How a sequence is partitioned by its mask."""

    chunks_per_rank: int = attrs.field(default=4, validator=attrs.validators.ge(2))
    """Chunks that the partition distributes to each rank to balance work: more chunks balance
    better where documents are short. Unit: chunks."""
    remap: bool = True
    """Assign chunks to ranks by the mask. If false, every rank holds one contiguous chunk and the
    mask only determines which keys are sent."""

    def partition(self, window: tuple[int, int] | None) -> Remapped | Contiguous:
        """Return the SequencePartition for a causal mask with this window."""
        if not self.remap:
            return Contiguous()
        return Remapped(multiple=self.chunks_per_rank, mask=Mask(window=window))


@attrs.frozen(kw_only=True, slots=False)  # it is one base of two
class HeadDegreeOptions:
    """The degree of Ulysses in a hybrid of Ulysses and routed keys."""

    ulysses_degree: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Neighbouring ranks that trade heads for sequence by all-to-all: preferably ranks of one node,
    since the all-to-all is exposed. It must divide ``parallel.context_parallel_size`` and the heads
    of a tensor-parallel rank. Unit: ranks."""
