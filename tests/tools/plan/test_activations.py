"""What a plan says of the activations of a run's layers."""

from __future__ import annotations

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE
from ascend_run.tools.plan.activations import activation_lines, layer_words
from tests.support.costs import planned


@pytest.mark.needs_plugins("recompute", "recompute-activation", "swap-attention")
def test_what_is_within_a_recomputed_part_names_its_plugin() -> None:
    values = {
        **DENSE,
        "model.num_layers": 4,
        "plugins.recompute.num_layers": 1,
        "plugins.swap-attention.recompute_mlp_layers": 2,
    }
    names = ("recompute", "recompute-activation", "swap-attention")
    prepared, _ = planned(values, names)
    lines = sorted(activation_lines(prepared.config, Hooks(prepared.instances())))
    without = "without effect: {} recomputes it with more".format
    activation = "mlp.activation_func: discarded by recompute-activation"
    assert lines == [
        "layer: recomputed by recompute in layer 0",
        f"{activation} in layer 0, {without('recompute')}",
        f"{activation} in layer 1, {without('swap-attention')}",
        f"{activation} in layers 2 to 3",
        f"mlp: recomputed by swap-attention in layer 0, {without('recompute')}",
        "mlp: recomputed by swap-attention in layer 1",
        f"self_attention: offloaded by swap-attention in layer 0, {without('recompute')}",
        "self_attention: offloaded by swap-attention in layers 1 to 3",
    ]


def test_many_runs_of_layers_are_abbreviated() -> None:
    assert layer_words([3]) == "layer 3"
    assert layer_words([5, 0, 1]) == "layers 0 to 1, 5"
    assert layer_words(range(0, 20, 2)) == "layers 0, 2, 4, 6, ..., 18"
