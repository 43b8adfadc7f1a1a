"""The plugin's declarations, errors and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError, Numerics, Support
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.swap_attention import SwapAttention, SwapAttentionConfig
from ascend_run.testing.models import DENSE
from tests.support.costs import planned
from tests.support.probed_runs import train

from .toy import LateDevice, make_inputs, make_stack, swap


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(SwapAttention) == ()
    assert SwapAttention.manifest.numerics is Numerics.BITWISE
    assert SwapAttention.manifest.platforms["cpu"] is Support.EMULATED


@pytest.mark.parametrize(
    "options", [{"min_bytes": 0}, {"prefetch": -1}, {"recompute_mlp_layers": -1}]
)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SwapAttentionConfig(**options)


@pytest.mark.parametrize("modules", [(), ("mlp",), ("self_attention", "self_attention")])
def test_parts_that_a_layer_does_not_have_are_refused(modules: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="modules must name some of 'input_layernorm'"):
        SwapAttentionConfig(modules=modules)


def test_selective_recomputation_goes_with_it_and_full_does_not() -> None:
    selective = {"model.recompute_granularity": "selective"}
    planned({**DENSE, **selective}, ("swap-attention",))
    full = {
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    }
    with pytest.raises(ConfigError, match=r"swap-attention.*model.recompute_granularity recomp"):
        planned({**DENSE, **full}, ("swap-attention",))


def test_a_feed_forward_is_not_recomputed_twice() -> None:
    options = {
        **DENSE,
        "plugins.swap-attention.recompute_mlp_layers": 2,
        "model.recompute_granularity": "selective",
    }
    planned({**options, "model.recompute_modules": ["core_attn"]}, ("swap-attention",))
    twice = r"'model.recompute_modules' and 'swap-attention' both treat .* of mlp, in layer 0 and 1"
    with pytest.raises(ConfigError, match=twice):
        planned({**options, "model.recompute_modules": ["mlp", "moe"]}, ("swap-attention",))


def test_swapped_bytes_are_counted_for_each_step() -> None:
    plugin = SwapAttention(SwapAttentionConfig(min_bytes=1))
    device: Any = LateDevice()
    stack = make_stack()
    swap(plugin, stack, device)
    (read,) = plugin.ascend_metrics().values()
    readings = []
    for micro_batches in (1, 2):
        plugin.ascend_before_step()
        for _ in range(micro_batches):
            stack(*make_inputs()).square().mean().backward()
        readings.append(read(context=None)["swap_bytes"])  # type: ignore[arg-type]
    assert readings[0] > 0
    assert readings[1] == 2 * readings[0]


def test_its_panel_names_the_metric_that_it_gives() -> None:
    plugin = SwapAttention(SwapAttentionConfig())
    panels = plugin.ascend_report()
    ((group, read),) = plugin.ascend_metrics().items()
    logged = {f"{group}/{name}" for name in read(context=None)}  # type: ignore[arg-type]
    assert {name for panel in panels for name in panel.metrics} == logged


def test_tokens_of_a_recomputed_mixture_are_counted_once(tmp_path: Path) -> None:
    loads = []
    for recomputed in (0, 1):
        values = {
            "enable": ["swap-attention"],
            "plugins.swap-attention.recompute_mlp_layers": recomputed,
        }
        run = train(tmp_path / str(recomputed), values=values, model="moe")
        loads.append(run.readings()[0]["expert_load"])
    assert loads[0] == loads[1]
