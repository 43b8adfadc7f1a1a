"""What a rank keeps, for backward, of the keys and values that other ranks sent it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

KvCache = Literal["none", "half", "full"]
"""Nothing; the keys; keys and values. What is kept is not sent again."""


@attrs.frozen(kw_only=True)
class KvCacheOptions:
    """Options of a plugin whose ranks send keys and values to each other."""

    kv_cache: Literal["none", "half", "full"] = "none"
    """What a rank keeps for backward of the keys and values that it received: nothing, the keys
    (``half``), or both (``full``); what it keeps is not sent again."""
    kv_cache_every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Keep them in one layer of this many, the first of all among them. Unit: layers."""

    def kv_cache_of(self, layer_index: int) -> KvCache:
        """What one layer keeps, of the whole model's counted from 0."""
        return "none" if layer_index % self.kv_cache_every else self.kv_cache

    def caching(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Those of these layers that keep anything."""
        return tuple(i for i in layers if self.kv_cache_of(i) != "none")


@attrs.frozen(kw_only=True)
class WholeKvCacheOptions(KvCacheOptions):
    """The same, of a plugin whose ranks bring the whole sequence's together for some heads."""

    kv_cache: Literal["none", "half", "full"] = "full"
    """What a rank keeps for backward of the keys and values of the whole sequence: nothing, the
    keys (``half``), or both (``full``); what it does not keep comes again from each rank's own."""


def kv_cache_problems(plugin: str, options: KvCacheOptions, num_layers: int) -> Iterator[str]:
    """A choice of layers of which nothing comes, each with the values that would work.

    Args:
        plugin: The name of the plugin whose options these are.
    """
    every = options.kv_cache_every
    named = f"{plugin}: plugins.{plugin}.kv_cache_every={every}"
    if every > num_layers:
        yield f"{named} is more than model.num_layers={num_layers}; use at most {num_layers}"
    if every > 1 and options.kv_cache == "none":
        yield (
            f"{named} chooses among layers, and plugins.{plugin}.kv_cache=none keeps nothing in "
            "any; set kv_cache to half or full, or leave kv_cache_every out"
        )
