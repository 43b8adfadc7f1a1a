"""Compiled layers together with other plugins' links: which are excluded from graphs, with equal
results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.parity import Parity
from ascend_run.types.forward import chain_of
from tests.support.marking import marking_link
from tests.support.probed_runs import built, prepare, probe

OPTIONS = {
    "plugins.swap-attention.min_bytes": 1,
    "plugins.swap-attention.recompute_mlp_layers": 1,
    "plugins.lora.export": False,
}
LINKING = ("compile", "lora", "matmul-add", "swap-attention")
KERNELS = {"model.recompute_granularity": "selective", "model.recompute_modules": ["core_attn"]}


@pytest.mark.exhaustive(by=lambda names: names)
@pytest.mark.needs_plugins(*LINKING)
@pytest.mark.parametrize(
    ("names", "config"),
    [(LINKING, {}), (("compile", "swap-attention"), KERNELS)],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else f"{len(value)}",
)
def test_linking_plugins_are_at_parity_together(
    parity: Parity, names: tuple[str, ...], config: dict[str, Any]
) -> None:
    """The campaign ``together`` has every pair, also with full recompute."""
    (outcome,) = parity(list(names), options=OPTIONS, config=config)
    if "compile" in names:
        assert outcome.metrics["compile/graphs"] > 0
    if "swap-attention" in names:
        assert outcome.metrics["swap-attention/swap_bytes"] > 0


@pytest.mark.needs_plugins("swap-attention")
def test_what_a_graph_of_a_norm_keeps_is_swapped_at_parity(parity: Parity) -> None:
    parts = {
        "plugins.compile.regions": "parts",
        "plugins.swap-attention.min_bytes": 1,
        "plugins.swap-attention.modules": ["input_layernorm", "pre_mlp_layernorm"],
    }
    (outcome,) = parity(["compile", "swap-attention"], options=parts)
    assert outcome.metrics["swap-attention/swap_bytes"] > 0
    assert outcome.metrics["compile/graphs"] > 0
    assert outcome.metrics["compile/breaks"] == 0


def links(tmp_path: Path, *names: str, **options: Any) -> dict[str, tuple[str, ...]]:
    """Return links of each module of the second layer in a run's model, by its name there."""
    values = {"enable": [*names], **options}
    probes = probe("ascend_layer", lambda self: marking_link([], None), "a-probe")
    with built(tmp_path, probes, values=values) as (_, context):
        layer = context.models["policy"].chunks[0].module.decoder.layers[1]
        return {name: chain_of(module).names for name, module in layer.named_modules()}


@pytest.mark.needs_plugins("swap-attention", "lora", "matmul-add")
def test_links_of_a_layer_are_in_resolved_order_across_hooks(
    tmp_path: Path,
) -> None:
    """swap-attention and compile link the parts of a layer by the layer's hook, lora by that of
    linears; matmul-add, which computes the matmul itself, is innermost."""
    found = links(tmp_path, *LINKING)
    assert found[""] == ("a-probe", "compile")
    assert found["self_attention"] == ("swap-attention",)
    assert found["mlp.linear_fc1"] == ("matmul-add", "compile", "lora")
    assert found["self_attention.core_attention"] == ("compile",)


@pytest.mark.needs_plugins("swap-attention", "lora", "matmul-add")
def test_the_plan_shows_the_chains_that_are_installed(tmp_path: Path) -> None:
    planned = {
        chain.module: (chain.links, chain.compilers)
        for chain in prepare(tmp_path, {"enable": [*LINKING]}).plan.forwards
    }
    assert planned == {
        "core_attention": ((), ("compile",)),
        "embedding": (("lora",), ()),
        "experts": (("lora",), ()),
        "layer": ((), ("compile",)),
        "linear": (("matmul-add", "lora"), ("compile",)),
        "mlp_bda": ((), ("compile",)),
        "moe_layer": ((), ("compile",)),
        "self_attention": (("swap-attention",), ()),
        "self_attn_bda": ((), ("compile",)),
    }
    installed = links(tmp_path, *LINKING)
    for name in ("linear_qkv", "core_attention", "linear_proj"):
        kind = "linear" if name.startswith("linear") else name
        chain = installed[f"self_attention.{name}"]
        order = tuple(link for link in chain if link not in planned[kind][1])
        assert (order, tuple(link for link in chain if link not in order)) == planned[kind]


@pytest.mark.needs_plugins("swap-attention")
def test_a_part_in_a_graph_is_swapped_around_the_graph(tmp_path: Path) -> None:
    options = {
        "plugins.compile.regions": "parts",
        "plugins.swap-attention.modules": ["input_layernorm"],
    }
    found = links(tmp_path, "compile", "swap-attention", **options)
    assert found["input_layernorm"] == ("compile", "swap-attention")
    assert found["pre_mlp_layernorm"] == ("compile",)


def test_dropout_beside_a_norm_is_outside_of_the_graphs(tmp_path: Path, parity: Parity) -> None:
    config = {"model.norm_placement": "both", "model.hidden_dropout": 0.1}
    (outcome,) = parity("compile", config=config)
    assert outcome.metrics["compile/graphs"] > 0
    found = links(tmp_path, "compile", **config)
    assert found["self_attn_bda"] == found["mlp_bda"] == ("compile",)
