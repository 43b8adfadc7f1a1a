"""Conversation files, and which of them are rejected before a run starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Layout, RunConfig
from ascend_run.plugins.tasks.sft import Sft, SftConfig
from ascend_run.types.config import DataSection, TrainSection
from tests.support.chats import LONG, write_lines, write_tokenizer
from tests.support.tiny_configs import model_fields, parallel_fields


def problems(options: dict[str, Any] | None = None, **values: Any) -> list[str]:
    """Return the plugin's error messages for a run."""
    sizes = {"pipeline_model_parallel_size": values.pop("pp", 1)}
    config = RunConfig(
        model=model_fields(
            {"vocab_size": values.pop("vocab_size", 1000), "num_moe_experts": values.pop("moe", 0)}
        ),
        parallel=parallel_fields(sizes),
        train=TrainSection(
            eval_interval=values.pop("eval_interval", 0), train_iters=values.pop("train_iters", 1)
        ),
        data=DataSection(**values),
    )
    hooks = Hooks([Sft(SftConfig(**(options or {})))])
    results = hooks.contributions("ascend_check", config=config, layout=Layout())
    return [problem for _, found in results for problem in found]


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    broken = write_lines(tmp_path / "broken.jsonl", ["{", {"text": "x"}])
    empty = write_lines(tmp_path / "empty.jsonl", [])
    folder = write_tokenizer(tmp_path / "tokenizer", None)
    told = problems(
        {"padding": "longest"},
        train=(broken, empty, str(tmp_path / "missing.jsonl")),
        tokenizer=str(folder),
        eval_interval=5,
        vocab_size=10,
        pp=2,
        moe=4,
    )
    for expected in (
        "train.eval_interval is 5, but data.validation is empty",
        "padding=longest does not go with parallel.pipeline_model_parallel_size=2",
        "padding=longest does not go with model.num_moe_experts=4",
        "has no chat template, neither in tokenizer_config.json nor in chat_template.jinja",
        "tokens, but model.vocab_size is 10",
        f"{broken}:1: not JSON",
        f"{broken}:2: expected the key",
        f"{empty} is empty",
        "missing.jsonl cannot be read: No such file or directory",
    ):
        assert sum(expected in problem for problem in told) == 1, expected
    assert len(told) == 9
    assert all(problem.startswith("sft: ") for problem in told)


def test_sound_data_raise_no_problem(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [{"messages": LONG}])
    folder = write_tokenizer(tmp_path / "tokenizer")
    assert problems(train=(train,), tokenizer=str(folder)) == []
    assert problems(train=(train,), tokenizer=str(folder / "tokenizer.json")) == []


def test_a_missing_tokenizer_is_named_with_the_way_out(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [{"messages": LONG}])

    def told(tokenizer: Path | None, **options: Any) -> str:
        named = None if tokenizer is None else str(tokenizer)
        (problem,) = problems(options, train=(train,), tokenizer=named)
        return problem

    assert "data.tokenizer is missing" in told(None)
    assert "there is no folder" in told(tmp_path / "nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert "has no tokenizer.json" in told(bare)
    (bare / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer.json" in told(bare)
    without_end = write_tokenizer(tmp_path / "without-end", eos_token=None)
    assert "names no eos_token" in told(without_end)
    broken = write_tokenizer(tmp_path / "broken", "{% if %}")
    assert "is no Jinja template" in told(broken)
    sound = write_tokenizer(tmp_path / "sound", None)
    assert "expected one of alpaca, aquila, baichuan, baichuan2" in told(sound, template="vicunna")
    assert "does not exist" in told(sound, template="none.jinja")
    (broken / "tokenizer_config.json").write_text("{")
    assert "cannot be read" in told(broken)


def test_checking_needs_no_torch(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [{"messages": LONG}])
    folder = write_tokenizer(tmp_path / "tokenizer")
    program = (
        "import sys\n"
        "from ascend_run.plugins.tasks.sft import Sft, SftConfig\n"
        "from ascend_run.plugin_api import RunConfig\n"
        "from tests.support.tiny_configs import model_fields, parallel_fields\n"
        "from ascend_run.types.config import DataSection\n"
        f"data = DataSection(train=({train!r},), tokenizer={str(folder)!r})\n"
        "config = RunConfig(model=model_fields(), parallel=parallel_fields(), data=data)\n"
        "assert Sft(SftConfig()).ascend_check(config) == []\n"
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
