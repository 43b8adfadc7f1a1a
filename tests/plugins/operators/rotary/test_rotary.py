"""Rotary embedding by each kernel against the run without the plugin, with every gradient."""

from __future__ import annotations

import os

import pytest

from ascend_run.ops.kernels.operator_kernels import PLATFORMS_OWN, choose
from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugins.operators.rotary import Rotary
from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.plugins.platforms.npu.kernels_on_cpu import NpuKernels
from tests.support.needed_plugins import case
from tests.support.tiny_options import planned_with

LAYERS, MICRO_BATCHES = 2, 4
PASSES = LAYERS * MICRO_BATCHES


@pytest.mark.exhaustive(by=lambda kernel: ())
@pytest.mark.parametrize("kernel", ["auto", "torch", "compile"])
def test_it_keeps_loss_gradients_and_weights(parity: Parity, kernel: str) -> None:
    """The CPU's own adds both halves of q and of k in place, forward and backward."""
    form = choose("rotary", kernel, os.environ.get(PLATFORM_VARIABLE, "cpu"))
    sums = 8 * PASSES if form == PLATFORMS_OWN else 0
    (outcome,) = parity("rotary", options={"plugins.rotary.kernel": kernel})
    (least,) = parity("rotary", options={"plugins.rotary.kernel": "compile"})
    assert outcome.operations.get("addcmul_", 0) - least.operations.get("addcmul_", 0) == sums
    turned = outcome.operations.get("stack", 0) - least.operations.get("stack", 0)
    assert (turned > 0) == (form == "torch")


@pytest.mark.exhaustive(by=lambda kernel, config: config if kernel == "torch" else [])
@pytest.mark.parametrize(
    "config",
    [
        {"model.rotary_interleaved": True},
        {"model.rotary_percent": 0.5, "model.qk_layernorm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["torch", "compile"])
def test_neighbours_parts_of_a_head_and_norms_of_heads(
    parity: Parity, kernel: str, config: dict[str, object]
) -> None:
    parity("rotary", config=config, options={"plugins.rotary.kernel": kernel})


@pytest.mark.exhaustive(by=lambda beside: ["beside"] if beside else [])
@pytest.mark.parametrize(
    ("beside", "model", "layout"),
    [
        ((), "dense", {"tp": 2}),
        case(("lora", "swap-attention"), "dense", {"dp": 2}),
        case(("ulysses", "gmm", "deterministic"), "moe", {"cp": 2}),
        case(("ring-attention",), "dense", {"cp": 2}),
    ],
    ids=str,
)
def test_the_plain_formula_goes_with_other_plugins_and_layouts(
    parity: Parity, beside: tuple[str, ...], model: str, layout: dict[str, int]
) -> None:
    options = {"plugins.rotary.kernel": "torch", "plugins.swap-attention.min_bytes": 1}
    parity("rotary", beside=beside, model=model, layout=layout, options=options)


@pytest.mark.parametrize(("kernel", "calls"), [("auto", 4 * PASSES), ("torch", 0)])
def test_on_the_npu_it_is_the_operator_of_the_npu(parity: Parity, kernel: str, calls: int) -> None:
    with offered(NpuKernels):
        options = {"plugins.rotary.kernel": kernel}
        (outcome,) = parity("rotary", beside=("npu-kernels",), options=options)
    assert outcome.operations.get("npu_rotary_mul", 0) == calls


def test_it_says_what_it_is_and_is_idle_without_rotary_positions() -> None:
    assert Rotary.manifest.numerics is Numerics.ROUNDING
    assert Rotary.manifest.level == 1
    for kind, idle in (("rope", set()), ("learned_absolute", {"rotary"})):
        plan = planned_with("rotary", f"model.position_embedding_type={kind}").plan
        assert {*plan.idle} == idle


def test_a_kernel_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(AscendRunError, match=r"rotary\.kernel=liger is for platform cuda"):
        planned_with("rotary", "plugins.rotary.kernel=liger")
