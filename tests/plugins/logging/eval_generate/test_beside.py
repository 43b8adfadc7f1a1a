"""Beside each feature and task, texts are those of ``generate`` by the checkpoint of the step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run import testing
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.plugin_api import AscendRunError
from ascend_run.testing.models import DENSE, MOE, trial_layout
from ascend_run.types.layout import world_size
from benchmarks.campaigns.features import IN_SETS, config_of, layout_of, settled
from benchmarks.campaigns.verify_clean_newer import BESIDE
from tests.support.chats import CHATML, SHORT, write_lines, write_tokenizer
from tests.support.generated import generated
from tests.support.preference_files import preferences
from tests.support.small_runs import prepare
from tests.support.tiny_llama import write_llama

from .test_eval_generate import OPTION, PROMPTS, WRITES, answered, written

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

DENSE_ONLY: Final = ("fused-mlp", "recompute-activation")
LAYOUTS: Final = {"moe-tp-extend-ep": {"tp": 2, "ep": 2}}


@pytest.mark.exhaustive(by=lambda name: ())
@pytest.mark.parametrize("name", [name for name in settled() if name != "eval-generate"])
def test_texts_beside_a_feature_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    names = tuple(dict.fromkeys((*([BESIDE[name]] if name in BESIDE else []), name)))
    model, sizes = MOE, LAYOUTS.get(name) or layout_of(names, 2)
    if name in DENSE_ONLY or "lora" in names:
        model, sizes = DENSE, {axis: size for axis, size in sizes.items() if axis != "ep"}
    options = {key: value for key, value in IN_SETS.items() if key.split(".")[1] in names}
    values = {**model, **trial_layout(sizes), **config_of(names), **options, **WRITES}
    if "lora" in names:  # a checkpoint has the adapters alone
        folder = write_llama(tmp_path, vocab_size=90, hidden_size=64, intermediate_size=64)
        stored = {"model.hf_path": folder, "model.family": "llama"}
        values = {k: v for k, v in values.items() if not k.startswith("model.")} | stored
    run = testing.run([*names, "eval-generate"], values, ranks=world_size(sizes), steps=2)
    assert written(run)[2] == answered(run.folder, 2, PROMPTS, Sampling())


@pytest.fixture
def chats(tmp_path: Path) -> dict[str, Any]:
    """Config of a run on a tokenizer with a chat template."""
    write_tokenizer(tmp_path / "tokenizer", CHATML)
    write_lines(tmp_path / "chats.jsonl", [{"messages": SHORT}] * 8)
    write_lines(tmp_path / "pairs.jsonl", preferences(8))
    return {
        "data.tokenizer": str(tmp_path / "tokenizer"),
        "data.seq_length": 64,
        "model.vocab_size": 512,
        f"{OPTION}.interval": 1,
        f"{OPTION}.max_new_tokens": 8,
        f"{OPTION}.prompt_ids": [],
        f"{OPTION}.prompts": ["<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"],
    }


@pytest.mark.exhaustive(by=lambda task: ())
@pytest.mark.parametrize("task", ["dpo", "simpo", "sft"])
def test_tasks_write_texts_with_the_model_that_trains(
    task: str, tmp_path: Path, chats: Mapping[str, Any]
) -> None:
    """Also where another model is beside it; special tokens of a prompt are those of the chat."""
    data = "chats.jsonl" if task == "sft" else "pairs.jsonl"
    values = {**chats, "data.train": [str(tmp_path / data)], "optimizer.lr": 0.05}
    run = testing.run([task, "eval-generate"], values, steps=2)
    (text,) = chats[f"{OPTION}.prompts"]
    (answer,) = generated(run.folder, text, "--max-new-tokens", 8)
    assert written(run)[2] == [answer["ids"]]
    assert written(run)[1] != written(run)[2]


def test_a_task_that_scores_is_refused(tmp_path: Path, chats: Mapping[str, Any]) -> None:
    values = {**DENSE, **chats, "task": "orm", "data.train": [str(tmp_path / "pairs.jsonl")]}
    with pytest.raises(AscendRunError, match="num_labels=1 gives the model a score head, which"):
        prepare(values, ["eval-generate"])
