"""Runs with compiled layers against the run without, forward and every gradient.

The campaign ``together`` has every layout, with recompute too, and every pair.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.runtime import RankOutcome
from tests.support.norm_operator import NORM

GRAPHS = "compile/graphs"
MOST_GRAPHS = 6
"""Norm; projection and rotation; output projection; residual; norm, MLP and residual, which are two
around experts. All layers share them, also the first one, whose input has other strides in a batch
of one. What an earlier run has compiled is not counted."""
LEAST_GRAPHS = 1 if "isolate_recompiles" in inspect.signature(torch.compile).parameters else 0
"""Before torch 2.13, a run may find those of an earlier one."""
PARTS = {"plugins.compile.regions": "parts", "plugins.compile.fullgraph": True}


def assert_compiled(outcome: RankOutcome, micro_batches: int = 4) -> None:
    """Check that layers' norms are in graphs, where their operators are not seen; the final norm is
    not."""
    assert outcome.operations[NORM] == micro_batches
    assert LEAST_GRAPHS <= outcome.metrics[GRAPHS] <= MOST_GRAPHS


def test_experts_keep_loss_gradients_and_weights(parity: Parity) -> None:
    """Dense layers are below, in parts and with other norms."""
    (outcome,) = parity("compile", model="moe")
    assert_compiled(outcome)


def test_norms_and_feed_forwards_are_whole_graphs_by_themselves(parity: Parity) -> None:
    (outcome,) = parity("compile", options=PARTS)
    assert_compiled(outcome)
    assert outcome.metrics["compile/breaks"] == 0


ROTARY = {
    "model.rotary_interleaved": True,
    "model.rotary_percent": 0.5,
    "model.qk_layernorm": True,
    "model.recompute_granularity": "selective",
}
BIASED = {
    "model.normalization": "LayerNorm",
    "model.add_bias_linear": True,
    "model.activation": "gelu",
    "model.share_embeddings_and_output_weights": True,
}


# Those with both take a minute: the suite has the biases, in parts, of other graphs than above.
@pytest.mark.exhaustive(by=lambda options: options)
@pytest.mark.parametrize(
    ("config", "options"),
    [(ROTARY, {}), (BIASED, {}), ({**ROTARY, **BIASED}, {}), (BIASED, PARTS)],
    ids=lambda values: "+".join(key.rpartition(".")[2] for key in values),
)
def test_other_layers_are_kept_too(
    parity: Parity, config: dict[str, object], options: dict[str, object]
) -> None:
    (outcome,) = parity("compile", config={"model.num_layers": 1, **config}, options=options)
    # A recomputed layer runs without autograd too, which is another variant.
    assert LEAST_GRAPHS <= outcome.metrics[GRAPHS] <= 2 * MOST_GRAPHS


def test_tokens_that_go_elsewhere_in_every_step_compile_nothing_anew(parity: Parity) -> None:
    case = Case(plugins=("compile",), model="moe", config={"train.global_batch_size": 8})
    (outcome,) = parity.outcomes(case, steps=6)
    assert_compiled(outcome, micro_batches=8)
