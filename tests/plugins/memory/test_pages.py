"""The formulas of the pages are what is planned, which other tests compare with what is saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pytest

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE
from tests.support.costs import planned
from tests.support.plugin_pages import DOCS
from tests.support.saved_tensors import expected_bytes

Values = Mapping[str, Any]
ITEM, STATISTIC = 2, 4
"""Bytes of a value and of a statistic."""
CONFIG: Final = {
    **DENSE,
    "train.precision": "bf16",
    "model.hidden_size": 40,
    "model.kv_channels": 6,
    "model.num_query_groups": 4,
    "model.ffn_hidden_size": 176,
}
SIZES: Final = {"H": 40, "F": 176, "N": 8, "G": 4, "D": 6}
"""Of this model; no sum of some is another."""
TENSORS: Final = {"parallel.tensor_model_parallel_size": 2}
SEQUENCE: Final = {**TENSORS, "parallel.sequence_parallel": True}
OF_TENSORS: Final = {**SIZES, "N": 4, "G": 2}
OF_SEQUENCE: Final = {**OF_TENSORS, "H": 20}


def page_of(name: str) -> str:
    return (DOCS / f"memory/{name}.md").read_text(encoding="utf-8")


def rows(name: str) -> Iterator[list[str]]:
    """Yield the cells of all rows of tables of a page."""
    for line in page_of(name).splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def row(name: str, first: str) -> list[str]:
    """Return the cells after the first one of the row that begins with it."""
    (found,) = (cells[1:] for cells in rows(name) if cells[0] == first)
    return found


def count(formula: str, sizes: Mapping[str, int] = SIZES) -> int:
    """Return the number of a sum of products, such as ``H + 3 N D``."""
    return sum(
        math.prod(int(sizes.get(factor, factor)) for factor in term.split())
        for term in formula.split(" + ")
    )


def kept(values: Values, plugins: Sequence[str] = (), ranks: int = 1) -> float:
    """Return the bytes that a layer saves on the device for each token."""
    prepared, (cost,) = planned({**CONFIG, **values}, plugins, ranks)
    policies = activation_policies(prepared.config, Hooks(prepared.instances()))
    rank = cost.rank
    return expected_bytes(cost, policies) / rank.num_microbatches / rank.tokens / len(rank.layers)


def saved_by(plugin: str, values: Values, options: Values, ranks: int = 1) -> float:
    named = {f"plugins.{plugin}.{key}": value for key, value in options.items()}
    return kept(values, (), ranks) - kept({**values, **named}, (plugin,), ranks)


@pytest.mark.needs_plugins("swap-attention")
@pytest.mark.parametrize(
    ("values", "ranks", "sizes"),
    [({}, 1, SIZES), (TENSORS, 2, OF_TENSORS), (SEQUENCE, 2, OF_SEQUENCE)],
    ids=["one rank", "tensors", "sequence"],
)
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("module", ["self_attention", "input_layernorm", "pre_mlp_layernorm"])
def test_what_swap_attention_moves(
    module: str, norm: str, values: Values, ranks: int, sizes: Mapping[str, int]
) -> None:
    formula, statistics = row("swap-attention", f"`{module}`")
    with_rms, _, with_layer = statistics.partition(", with LayerNorm ")
    each = with_layer if with_layer and norm == "LayerNorm" else with_rms
    shards = 2 if values == SEQUENCE and module != "self_attention" else 1
    moved = saved_by(
        "swap-attention",
        {**values, "model.normalization": norm},
        {"min_bytes": 1, "modules": [module]},
        ranks,
    )
    assert moved == count(formula, sizes) * ITEM + count(each, sizes) / shards * STATISTIC


@pytest.mark.needs_plugins("recompute-activation")
@pytest.mark.parametrize(
    ("first", "activation", "is_gated"),
    [
        ("SwiGLU, any function with a gate but QuickGELU", "silu", True),
        ("SwiGLU, any function with a gate but QuickGELU", "gelu", True),
        ("QuickGELU with a gate", "quick_gelu", True),
        ("GELU, SiLU without a gate", "gelu", False),
        ("GELU, SiLU without a gate", "silu", False),
        ("squared ReLU", "squared_relu", False),
        ("QuickGELU without a gate", "quick_gelu", False),
    ],
)
def test_what_recompute_activation_leaves(first: str, activation: str, is_gated: bool) -> None:
    values = {"model.activation": activation, "model.gated_linear_unit": is_gated}
    _, (cost,) = planned({**CONFIG, **values})
    plain = sum(t.nbytes for t in cost.rank.saved[0] if t.part == "mlp" and t.name != "input")
    without, with_it = (count(formula) * ITEM for formula in row("recompute-activation", first))
    assert plain / cost.rank.tokens == without
    assert saved_by("recompute-activation", values, {}) == without - with_it


@pytest.mark.needs_plugins("recompute-norm")
@pytest.mark.parametrize(("norm", "each"), [("RMSNorm", 1), ("LayerNorm", 2)])
def test_what_recompute_norm_saves(norm: str, each: int) -> None:
    page = page_of("recompute-norm")
    assert "\n    2 H values and 2 statistics fewer\n" in page
    assert "statistics of 4 bytes, one with RMSNorm and two with LayerNorm" in page
    found = saved_by("recompute-norm", {"model.normalization": norm}, {})
    assert found == count("2 H") * ITEM + 2 * each * STATISTIC


@pytest.mark.needs_plugins("recompute", "recompute-comm-opt")
@pytest.mark.parametrize(
    ("values", "sizes"),
    [(TENSORS, OF_TENSORS), (SEQUENCE, OF_SEQUENCE)],
    ids=["tensors", "sequence"],
)
def test_what_recomputed_layers_save(values: Values, sizes: Mapping[str, int]) -> None:
    assert "the residual stream: H values per token" in page_of("recompute")
    assert "\n    H values of the residual stream, divided by the" in page_of("recompute-comm-opt")
    plain = kept(values, ("recompute",), 2)
    by_blocks = {**values, "plugins.recompute-comm-opt.level": 2}
    assert plain == count("H", sizes) * ITEM
    assert kept(by_blocks, ("recompute", "recompute-comm-opt"), 2) == 2 * plain


@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param(name, marks=pytest.mark.needs_plugins(name))
        for name in ("swap-optimizer", "virtual-optimizer")
    ],
)
@pytest.mark.parametrize(
    ("first", "precision"),
    [
        ("AdamW, `train.precision=fp32`", "fp32"),
        ("AdamW, bf16 or fp16", "bf16"),
        ("AdamW, bf16 or fp16", "fp16"),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_what_optimizers_keep_on_the_device(plugin: str, first: str, precision: str) -> None:
    """Whole bytes of a parameter; a step count of each tensor is less."""
    documented = [int(cell.split()[0].rstrip(":")) for cell in row(plugin, first)]
    for plugins, expected in zip(((), (plugin,)), documented, strict=True):
        _, (cost,) = planned({**CONFIG, "train.precision": precision}, plugins)
        assert int(cost.memory.optimizer / cost.trained_parameters) == expected


@pytest.mark.needs_plugins("virtual-optimizer", "reuse-fp32-param")
def test_what_halved_master_weights_keep_on_the_device() -> None:
    first = "AdamW, bf16, with [reuse-fp32-param](reuse-fp32-param.md)"
    documented = [int(cell.split()[0]) for cell in row("virtual-optimizer", first)]
    for more, expected in zip(((), ("virtual-optimizer",)), documented, strict=True):
        _, (cost,) = planned(CONFIG, ("reuse-fp32-param", *more))
        assert int(cost.memory.optimizer / cost.trained_parameters) == expected
