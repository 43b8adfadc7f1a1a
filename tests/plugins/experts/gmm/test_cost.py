"""Grouped GEMMs save fewer tensors, and the plan accounts for it."""

from __future__ import annotations

from ascend_run.testing.models import DENSE, MOE
from tests.support.costs import planned


def test_three_widths_a_token_are_kept_rather_than_five() -> None:
    sizes = {"data.seq_length": 256, "train.micro_batch_size": 4, "model.vocab_size": 4096}
    config = {**MOE, **sizes}  # so many logits that the loss has the peak
    _, (plain,) = planned(config)
    _, (cost,) = planned(config, ("gmm",))
    width = 256 * 4 * 2 * 48 * 4  # tokens, top-k, F, float32
    assert plain.memory.moment == cost.memory.moment == "loss"
    assert plain.memory.peak - cost.memory.peak == 2 * 2 * width  # layers, tensors


def test_a_model_without_experts_is_left_alone() -> None:
    _, (cost,) = planned(DENSE, ("gmm",))
    assert "gmm" not in cost.changes
