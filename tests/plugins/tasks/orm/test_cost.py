"""What a score head costs in a plan: its own parameters, and no logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE
from tests.support.costs import planned, sent_bytes
from tests.support.preference_files import write_pairs

SP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
PP = {"parallel.pipeline_model_parallel_size": 2}
TIED = {"model.share_embeddings_and_output_weights": True}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), 4)
    return {
        "data.train": [str(folder / "train.jsonl")],
        "data.tokenizer": str(folder / "tokenizer"),
        "model.vocab_size": 397,
    }


CASES: dict[str, tuple[int, Mapping[str, Any]]] = {
    "dense": (1, DENSE),
    "tied": (1, {**DENSE, **TIED}),
    "tp=2, sp": (2, {**DENSE, **SP}),
    "pp=2": (2, {**DENSE, **PP}),
    "pp=2, tied": (2, {**DENSE, **PP, **TIED}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_output_layer_is_replaced_by_a_row(pairs: Mapping[str, Any], case: str) -> None:
    ranks, model = CASES[case]
    _, plain = planned({**model, **pairs, "task": "simpo"}, (), ranks)
    _, scored = planned({**model, **pairs, "task": "orm"}, (), ranks)
    for one, other in zip(plain, scored, strict=True):
        before = {p.key: p.numel for p in one.rank.parameters}
        after = {p.key: p.numel for p in other.rank.parameters}
        head = after.pop("output_layer.weight", None)
        before.pop("output_layer.weight", None)
        assert after == before
        assert head == (DENSE["model.hidden_size"] if one.rank.is_last else None)
        assert other.memory.peak < one.memory.peak if one.rank.is_last else True
        assert other.flops < one.flops if one.rank.is_last else other.flops == one.flops
    assert sent_bytes(scored[-1], "all_reduce", "embd") == 0
