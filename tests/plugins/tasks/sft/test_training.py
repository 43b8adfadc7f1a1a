"""Ten steps against transformers: the same model and conversations, labels made by transformers.
Then resuming, and the layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import assert_the_same_in_two_halves, whole_run
from tests.support.chats import CHATML, GENERATION, with_mask, write_lines, write_tokenizer
from tests.support.needed_plugins import names_of
from tests.support.task_runs import BATCH, CP, PP, STEPS, TP, Layout, batches_of, run_values
from tests.support.tiny_llama import train_reference, write_llama

WORDS = (
    *("one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "hello", "fox"),
)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return conversations of one to three turns of different lengths."""
    made = []
    for index in range(count):
        messages = []
        for turn in range(1 + index % 3):
            begin = (index * 5 + turn * 3) % len(WORDS)
            said = [WORDS[(begin + k) % len(WORDS)] for k in range(1 + (index * 7 + turn) % 5)]
            messages += [
                {"role": "user", "content": " ".join(said) + "?"},
                {"role": "assistant", "content": " ".join(reversed(said)) + "."},
            ]
        made.append({"messages": messages})
    return made


def write_workplace(folder: Path) -> Path:
    """Write a model, its tokenizer and files."""
    write_llama(folder / "model")
    write_tokenizer(folder / "tokenizer", CHATML)
    write_tokenizer(folder / "blocks", GENERATION)
    write_lines(folder / "train.jsonl", conversations(STEPS * BATCH))
    write_lines(folder / "held-out.jsonl", conversations(7))
    return folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workplace(tmp_path_factory.mktemp("sft"))


def losses_of_transformers(
    workplace: Path, mask_of: Callable[[list[bool]], Tensor | None]
) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(workplace / "blocks")
    records = map(json.loads, (workplace / "train.jsonl").read_text().splitlines())
    samples = [with_mask(tokenizer, record["messages"]) for record in records]
    model = LlamaForCausalLM.from_pretrained(workplace / "model")
    return list(train_reference(model, batches_of(samples), mask_of))


@pytest.fixture(scope="module")
def reference(workplace: Path) -> list[float]:
    """Return losses of transformers' model."""
    return losses_of_transformers(workplace, lambda trained: None)


def prefix_mask(trained: list[bool]) -> Tensor:
    """Return [1, 1, S, S], added to the scores: tokens before the answer see each other."""
    hidden = torch.full((len(trained), len(trained)), -torch.inf).triu(1)
    hidden[: trained.index(True), : trained.index(True)] = 0
    return hidden[None, None]


def values(workplace: Path, output: Path, **changes: Any) -> dict[str, Any]:
    in_order = {
        "data__validation": [str(workplace / "held-out.jsonl")],
        "data__seq_length": 112,
        "plugins__sft__shuffle": False,
    }
    return run_values("sft", workplace, output, **{**in_order, **changes})


LAYOUTS: dict[str, Layout] = {
    "one": (1, {}, ()),
    "one, all at once": (1, {"train__micro_batch_size": 4}, ()),
    "one, padded to seq_length": (1, {"plugins__sft__padding": "seq_length"}, ()),
    "dp=2": (2, {"train__micro_batch_size": 2}, ()),
    "dp=4": (4, {}, ()),
    "tp=2, sp": (2, {TP: 2, "parallel__sequence_parallel": True, "train__micro_batch_size": 2}, ()),
    "pp=2": (2, {PP: 2}, ()),
    "cp=2": (2, {CP: 2}, ("ulysses",)),
    "cp=2, an odd length": (2, {CP: 2, "data__seq_length": 113}, ("unaligned-ulysses",)),
    "cp=3, four heads": (
        3,
        {CP: 3, "data__seq_length": 114, "train__micro_batch_size": 2},
        ("unaligned-ulysses",),
    ),
}


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1, bool(LAYOUTS[layout][2])])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_ten_losses_are_those_of_transformers(
    gloo_pool: GlooPool, workplace: Path, reference: list[float], tmp_path: Path, layout: str
) -> None:
    ranks, changes, plugins = LAYOUTS[layout]
    run = values(workplace, tmp_path / "run", **changes)
    ended = gloo_pool.run(whole_run, ranks, run, plugins, timeout=100)
    losses = [line["loss"] for line in ended[0].readings]
    assert losses == pytest.approx(reference, rel=1e-5)
    assert max(reference) - min(reference) > 0.5


def test_so_they_are_where_a_prompts_tokens_see_one_another(
    gloo_pool: GlooPool, workplace: Path, reference: list[float], tmp_path: Path
) -> None:
    changes = {**LAYOUTS["one, all at once"][1], "plugins__sft__bidirectional_prompt": True}
    run = values(workplace, tmp_path / "run", **changes)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    losses = [line["loss"] for line in ended.readings]
    assert losses == pytest.approx(losses_of_transformers(workplace, prefix_mask), rel=1e-5)
    assert losses != pytest.approx(reference, rel=1e-3)


def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    def run(name: str, **changes: Any) -> Any:
        options = values(
            workplace, tmp_path / name, plugins__sft__shuffle=True, train__micro_batch_size=2,
            **changes,
        )  # fmt: skip
        return gloo_pool.run(whole_run, 2, options, timeout=100)

    # 13 steps of 4: into the second epoch of 40 conversations.
    assert_the_same_in_two_halves(run, 13, 9)


def test_evaluation_reads_the_held_out_file(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    (ended,) = gloo_pool.run(
        whole_run, 1, values(workplace, tmp_path / "run", train__eval_interval=5,
                             train__eval_iters=2, optimizer__lr=0.0), timeout=100
    )  # fmt: skip
    evaluated = [line["eval_loss"] for line in ended.readings if "eval_loss" in line]
    assert len(evaluated) == 3
    assert len({*evaluated}) == 1
