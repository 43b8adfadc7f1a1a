"""What the formula implies, of a whole step in float64: equal models, and margins that saturate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.support.chats import write_lines
from tests.support.first_steps import step_values, steps_of
from tests.support.plain_preferences import log_probability
from tests.support.preference_files import preferences, tokenized, write_models_and_pairs

PAIRS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("dpo"), PAIRS)


def values(models: Path, reference: str, **changes: Any) -> dict[str, Any]:
    return {
        **{k: v for k, v in step_values("dpo", models, packing=True).items() if "model." not in k},
        "model.hf_path": str(models / "model"),
        "model.make_vocab_size_divisible_by": 8,
        "data.train": [str(models / "train.jsonl")],
        "data.seq_length": 256,
        "plugins.dpo.reference": str(models / reference),
        **changes,
    }


@pytest.mark.exhaustive(by=lambda smoothing: [])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_equal_models_cost_log_2(models: Path, smoothing: float) -> None:
    changes = {"plugins.dpo.label_smoothing": smoothing}
    with steps_of(values(models, "model", **changes)) as step:
        totals, gradients = step(None)
    assert totals.count == PAIRS
    assert totals.loss == pytest.approx(math.log(2), rel=1e-14)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert totals.metrics[name] == 0.0
    assert all(gradient.any() for gradient in gradients.values())


def margins(models: Path) -> list[float]:
    """Return the difference of the log-ratios of each pair, by transformers."""
    policy, reference = (
        LlamaForCausalLM.from_pretrained(models / name).requires_grad_(False)
        for name in ("model", "other")
    )
    return [
        float(
            log_probability(policy, chosen)
            - log_probability(reference, chosen)
            - log_probability(policy, rejected)
            + log_probability(reference, rejected)
        )
        for chosen, rejected in tokenized(models / "blocks", models / "train.jsonl")
    ]


@pytest.mark.exhaustive(by=lambda loss: [])
@pytest.mark.parametrize("loss", ["sigmoid", "hinge"])
def test_a_step_of_saturated_pairs_changes_nothing(models: Path, tmp_path: Path, loss: str) -> None:
    """Beta is so large that every pair whose answers are in the order of their ratios saturates;
    one the wrong way round has all of the gradient."""
    records, found = preferences(PAIRS), margins(models)
    assert min(map(abs, found)) > 1e-3
    for record, margin in zip(records, found, strict=True):
        if margin < 0:
            record["chosen"], record["rejected"] = record["rejected"], record["chosen"]
    changes = {"plugins.dpo.loss": loss, "plugins.dpo.beta": 1e7}
    ordered = [write_lines(tmp_path / "ordered.jsonl", records)]
    with steps_of({**values(models, "other", **changes), "data.train": ordered}) as step:
        totals, gradients = step(None)
    assert (totals.loss, totals.metrics["rewards/accuracies"]) == (0.0, 1.0)
    assert not any(gradient.any() for gradient in gradients.values())
    first = records[0]
    first["chosen"], first["rejected"] = first["rejected"], first["chosen"]
    wrong = [write_lines(tmp_path / "wrong.jsonl", records)]
    with steps_of({**values(models, "other", **changes), "data.train": wrong}) as step:
        totals, gradients = step(None)
    hinged = 1.0 if loss == "hinge" else 0.0
    assert totals.loss == pytest.approx((hinged + 1e7 * abs(found[0])) / PAIRS, rel=1e-3)
    assert all(gradient.any() for gradient in gradients.values())
