"""SwiGLU by each kernel against the run without the plugin, forward and every gradient."""

from __future__ import annotations

import os

import pytest

from ascend_run.ops.kernels.operator_kernels import choose
from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugins.operators.swiglu import Swiglu
from ascend_run.testing.models import DENSE
from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.plugins.platforms.npu.kernels_on_cpu import NpuKernels
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.tiny_options import planned_with

LAYERS, MICRO_BATCHES = 2, 4
GATES = LAYERS * MICRO_BATCHES


@pytest.mark.parametrize("kernel", ["auto", "torch", "compile"])
def test_it_keeps_loss_gradients_and_weights(parity: Parity, kernel: str) -> None:
    """A compiled one is in a graph, where its operators are not seen."""
    (outcome,) = parity("swiglu", options={"plugins.swiglu.kernel": kernel})
    form = choose("swiglu", kernel, os.environ.get(PLATFORM_VARIABLE, "cpu"))
    gates = 0 if form == "compile" else GATES
    assert outcome.operations.get("silu", 0) == outcome.operations.get("silu_backward", 0) == gates


def test_the_plain_formula_goes_with_tensors_in_parts(parity: Parity) -> None:
    """The campaign ``together`` has every layout and every pair."""
    parity("swiglu", layout={"tp": 2}, options={"plugins.swiglu.kernel": "torch"})


@pytest.mark.exhaustive(by=lambda beside, model: [model, *beside])
@pytest.mark.parametrize(
    ("beside", "model"),
    [((), "dense"), ((), "moe"), case(("gmm",), "moe")],
    ids=["dense", "experts", "experts-gmm"],
)
def test_on_the_npu_it_is_the_operator_of_the_npu(
    parity: Parity, beside: tuple[str, ...], model: str
) -> None:
    """For MLPs, shared experts and experts; ``torch`` replaces it in all of them."""
    config = {"model.moe_shared_expert_intermediate_size": 32} if model == "moe" else {}

    def calls(kernel: str) -> tuple[int, int]:
        with offered(NpuKernels):
            options = {"plugins.swiglu.kernel": kernel}
            names = (*beside, "npu-kernels")
            (outcome,) = parity("swiglu", beside=names, model=model, config=config, options=options)
        seen = outcome.operations
        return seen.get("npu_swiglu", 0), seen.get("npu_swiglu_backward", 0)

    forward, backward = calls("auto")
    assert calls("torch") == (0, 0)
    if model == "dense":
        assert (forward, backward) == (GATES, GATES)
    elif beside:  # one call for all experts, and one more in backward
        assert (forward, backward) == (3 * GATES, 2 * GATES)
    else:  # one call per expert that has tokens
        assert forward == backward > 2 * GATES


def test_a_compiled_one_keeps_one_width_a_token_less() -> None:
    sizes = {"data.seq_length": 256, "train.micro_batch_size": 4, "model.vocab_size": 4096}
    config = {**DENSE, **sizes}
    _, (plain,) = planned(config)
    _, (cost,) = planned({**config, "plugins.swiglu.kernel": "compile"}, ("swiglu",))
    assert plain.memory.moment == cost.memory.moment == "loss"
    assert plain.memory.peak - cost.memory.peak == LAYERS * 256 * 4 * 48 * 4  # tokens, F, float32


def test_it_says_what_it_is_and_is_idle_without_a_gate() -> None:
    assert Swiglu.manifest.numerics is Numerics.ROUNDING
    assert Swiglu.manifest.level == 1
    for gated, idle in (("true", set()), ("false", {"swiglu"})):
        plan = planned_with("swiglu", f"model.gated_linear_unit={gated}").plan
        assert {*plan.idle} == idle


def test_other_activations_and_missing_kernels_are_rejected() -> None:
    """The error is raised before anything starts."""
    with pytest.raises(AscendRunError, match=r"swiglu.*model\.activation == silu"):
        planned_with("swiglu", "model.activation=gelu")
    with pytest.raises(AscendRunError, match=r"swiglu\.kernel=liger is for platform cuda"):
        planned_with("swiglu", "plugins.swiglu.kernel=liger")
