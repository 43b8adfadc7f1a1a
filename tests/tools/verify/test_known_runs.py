"""Every family, task and adapter of the package is compared with the oracle, or listed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.plugin_api import Numerics
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.testing.oracle.known import PLUGINS, TASKS
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.oracle import what_the_oracle_lacks
from ascend_run.tools.verify.questions import Question
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.tiny_families import FAMILIES, model_values, tiny_run

from .test_oracle import compared

UNKNOWN: Final = frozenset(
    {"dpo", "low-precision-optimizer", "o2-bf16-optimizer", "orm", "prm", "qlora", "simpo"}
)
"""Tasks and features of the package that the oracle has no formula for: it rounds nothing, and
compares no answers."""
_VOCABULARY: Final = 512
"""Of the tokenizer of the conversations, and more."""


ADAPTERS: Final[tuple[tuple[str, ...], ...]] = ((), ("lora",))
RUNS: Final = [
    (family, task, adapters)
    for family in FAMILIES
    for task in sorted(TASKS)
    for adapters in ADAPTERS
]


def question_of(family: str, task: str, adapters: tuple[str, ...], folder: Path) -> Question:
    """Verify a tiny model of a family; conversations are in a file."""
    values: dict[str, Any] = model_values(family)
    if task == "pretrain":
        return Question(enable=adapters, layout={}, config=values)
    write_tokenizer(folder / "tokenizer", CHATML)
    said = [{"role": "user", "content": "one two?"}, {"role": "assistant", "content": "two, one."}]
    lines = [{"messages": said * (1 + index % 2)} for index in range(8)]
    write_lines(folder / "train.jsonl", lines)
    file = folder / "run.toml"
    file.write_text('task = "sft"\n', encoding="utf-8")
    values |= {
        "model.vocab_size": _VOCABULARY,
        "data.train": [str(folder / "train.jsonl")],
        "data.tokenizer": str(folder / "tokenizer"),
        "data.seq_length": 40,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 4,
        "train.train_iters": 4,
        "run.seed": 3,
    }
    return Question(enable=adapters, layout={}, file=str(file), config=values)


@pytest.mark.needs_plugins("lora")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_known_with_every_adapter(family: str) -> None:
    for adapters in ADAPTERS:
        assert what_the_oracle_lacks(tiny_run(family, adapters)) == ()


def test_every_task_and_feature_that_changes_the_model_is_known_or_listed() -> None:
    catalogue = discover()
    ours = [name for name, found in catalogue.items() if found.first_party]
    tasks = {name for name in ours if catalogue[name].kind is Kind.TASK}
    features = [name for name in ours if catalogue[name].kind is Kind.FEATURE]
    found = catalogue.load(features)
    change = {name for name in features if found[name].manifest.numerics is Numerics.MODEL}
    assert tasks | change <= TASKS | PLUGINS | UNKNOWN
    assert tasks | change >= UNKNOWN


@pytest.mark.needs_plugins("lora", "sft")
@pytest.mark.exhaustive(by=lambda run: run[1:])
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_family_with_a_task_and_an_adapter_agrees(
    gloo_pool: GlooPool, tmp_path: Path, run: tuple[str, str, tuple[str, ...]]
) -> None:
    found, _, _ = compared(gloo_pool, question_of(*run, tmp_path))
    assert [check for check in found.checks if not check.passed] == []
