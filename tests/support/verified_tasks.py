"""``verify`` of a task on a tiny file: the layouts, and what a verdict must say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ascend_run.tools.verify.compare.verdict import Outcome, Phase, Verdict
from ascend_run.tools.verify.questions import Question

Layout = tuple[dict[str, int], dict[str, Any], tuple[str, ...]]
"""Sizes of axes, values, and plugins."""

LAYOUTS: Final[Mapping[str, Layout]] = {
    "tp=2": ({"tp": 2}, {}, ()),
    "tp=2, sp": ({"tp": 2, "sp": 1}, {}, ()),
    "pp=2": ({"pp": 2}, {}, ()),
    "pp=2, vpp=2": ({"pp": 2, "vpp": 2}, {}, ()),
    "ep=2": ({"ep": 2}, {}, ()),
    "tp=2, ep=2": ({"tp": 2, "ep": 2}, {}, ()),
    "dp=2, distributed optimizer": ({"dp": 2}, {"ddp.use_distributed_optimizer": True}, ()),
    "tp=2, pp=2, sp": ({"tp": 2, "pp": 2, "sp": 1}, {}, ()),
    "cp=2, ulysses": ({"cp": 2}, {}, ("ulysses",)),
    "cp=2, ring": ({"cp": 2}, {}, ("ring-attention",)),
}
TIED: Final[Layout] = ({"pp": 2}, {"model.share_embeddings_and_output_weights": True}, ())


def question(task: str, folder: Path, layout: Layout, values: Mapping[str, Any]) -> Question:
    """Ask for two steps in a layout.

    Args:
        folder: Contains ``tokenizer`` and ``train.jsonl``.
        values: Of the task in every layout.
    """
    sizes, changes, plugins = layout
    return Question(
        task=task,
        enable=plugins,
        layout=sizes,
        steps=2,
        config={
            "model.vocab_size": 400,
            "data.train": [str(folder / "train.jsonl")],
            "data.tokenizer": str(folder / "tokenizer"),
            "data.seq_length": 96,
            **values,
            **changes,
        },
    )


def assert_is_one_rank(verdict: Verdict, oracle_lacks: str) -> None:
    """Check that a layout is one rank, on packed documents."""
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    assert verdict.outcome is Outcome.WITHIN
    assert f"not compared with the oracle: {oracle_lacks}" in verdict.notes
    documents = {case.name: case.occurred for case in verdict.cases}
    assert documents["several documents in a row"]


def assert_diverges_in(phase: Phase, verdict: Verdict) -> None:
    """Check that a planted fault is found where it first shows."""
    assert verdict.outcome is Outcome.DIVERGES
    assert verdict.fault is not None
    assert verdict.fault.phase is phase
