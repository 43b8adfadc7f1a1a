"""Options of the KV cache: which layers save received keys and values, and which choices fail."""

from __future__ import annotations

import pytest

from ascend_run.ops.attention.context_parallel.options import KvCacheOptions
from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.prepare import prepare
from ascend_run.registry.discovery import discover

RUN = ["run.nproc=2", "parallel.context_parallel_size=2", "model.family=llama", "data.train=x",
       "model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=4",
       "model.ffn_hidden_size=48", "model.vocab_size=64", "data.seq_length=16"]  # fmt: skip


def keeping() -> list[str]:
    """Return the names of built-in plugins with these options."""
    catalogue = discover()
    loaded = catalogue.load(name for name, found in catalogue.items() if found.first_party)
    return sorted(
        plugin.manifest.name
        for plugin in loaded.values()
        if issubclass(getattr(plugin, "config_class", object), KvCacheOptions)
    )


def refusal(name: str, *options: str) -> str:
    words = [f"plugins.{name}.{option}" for option in options]
    with pytest.raises(AscendRunError) as refused:
        prepare(None, [*RUN, *words], enable=[name])
    return str(refused.value)


def test_one_layer_of_so_many_keeps_the_first_among_them() -> None:
    options = KvCacheOptions(kv_cache="half", kv_cache_every=3)
    assert [options.kv_cache_of(i) for i in range(4)] == ["half", "none", "none", "half"]
    assert options.caching(range(1, 7)) == (3, 6)


@pytest.mark.parametrize("name", keeping())
def test_a_choice_of_layers_of_which_nothing_comes_is_refused(name: str) -> None:
    """More layers than the model has, or a policy that saves nothing; both are reported at once."""
    told = refusal(name, "kv_cache=full", "kv_cache_every=5")
    assert f"plugins.{name}.kv_cache_every=5 is more than model.num_layers=4; use at most 4" in told
    assert "saves nothing" not in told
    told = refusal(name, "kv_cache=none", "kv_cache_every=5")
    assert "is more than model.num_layers=4" in told
    assert f"plugins.{name}.kv_cache=none saves nothing in any layer" in told
    assert "set kv_cache to half or full, or remove kv_cache_every" in told
    prepare(
        None,
        [*RUN, f"plugins.{name}.kv_cache=half", f"plugins.{name}.kv_cache_every=4"],
        enable=[name],
    )
