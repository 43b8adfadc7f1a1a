"""Saved activations of compiled layers, as a plan expects them."""

from __future__ import annotations

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.costs import planned
from tests.support.saved_tensors import expected_bytes, saved_bytes


def test_a_layer_does_not_keep_the_non_linearity_of_its_gate(gloo_pool: GlooPool) -> None:
    config = {**DENSE, "train.global_batch_size": 1}

    ((saved,),) = gloo_pool.run(saved_bytes, 1, [(("compile",), config)])

    _, (plain,) = planned(config)
    _, (cost,) = planned(config, ("compile",))
    assert saved == expected_bytes(cost)
    assert expected_bytes(plain) - saved == 2 * 16 * 48 * 4  # layers, tokens, F, float32


def test_what_is_in_no_graph_keeps_all() -> None:
    """Layers with experts, and with parts, linears that communicate."""
    split = {**MOE, "model.moe_layer_freq": [0, 1], "parallel.tensor_model_parallel_size": 2}
    split["parallel.sequence_parallel"] = True
    _, (cost,) = planned(split, ("compile",), 2)
    (again,) = cost.changes["compile"].saved
    assert again.layers == (0,)
    _, (cost,) = planned({**split, "plugins.compile.regions": "parts"}, ("compile",), 2)
    assert "compile" not in cost.changes
