"""lm-evaluation-harness by its own class for Hugging Face models, and by ours: the same numbers.

Not part of ``make test``, which has no lm-eval: ``make test-lm-eval`` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ascend_run.entrypoints.cli import run
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.text.tokenizer import train_tokenizer
from ascend_run.tools.evaluate.harness.adapter import open_lm
from tests.support.tiny_llama import write_llama

pytestmark = pytest.mark.filterwarnings("default")
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven")
END, BEGIN = "<|endoftext|>", "<|begin|>"
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS, LONGEST = 50, 64
TASKS = ("choices", "rolling", "generated", "continued")


def words(*seeds: int, count: int) -> str:
    generator = torch.Generator().manual_seed(sum(seed * 1000**n for n, seed in enumerate(seeds)))
    numbers = torch.randint(len(WORDS), (count,), generator=generator)
    return " ".join(WORDS[number] for number in numbers)


@pytest.fixture(scope="module", params=["end", "begin-added"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer that has no token to begin a text, and one that adds it."""
    path: Path = tmp_path_factory.mktemp("llama")
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
    content = json.loads(tokenizer.to_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    config["chat_template"] = TEMPLATE
    vocab_size = tokenizer.vocab_size
    if request.param == "begin-added":
        one = {"content": BEGIN, "id": vocab_size, "special": True, "single_word": False}
        content["added_tokens"].append(
            one | {"lstrip": False, "rstrip": False, "normalized": False}
        )
        begins = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begins, text],
            "pair": [begins, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BEGIN: {"id": BEGIN, "ids": [vocab_size], "tokens": [BEGIN]}},
        }
        config["bos_token"] = BEGIN
        vocab_size += 1
    end_id = next(one["id"] for one in content["added_tokens"] if one["content"] == END)
    ids = {"eos_token_id": end_id, "bos_token_id": None, "pad_token_id": end_id}
    write_llama(path, vocab_size=vocab_size, max_position_embeddings=LONGEST, **ids)
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def theirs(model: Path) -> HFLM:
    with computing_in(torch.float64):
        return HFLM(pretrained=str(model), dtype="float64", device="cpu", batch_size=1)


@pytest.fixture(scope="module")
def tasks(theirs: HFLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local tasks of each kind of request; half of the answers are those of the model."""
    folder: Path = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "text": words(n, 1, count=6 + n % 9),
            "long": words(n, 2, count=20 + 5 * n),
            "choices": [words(n, 3, k, count=1 + k) for k in range(4)],
            "answer": n % 4,
        }
        for n in range(ROWS)
    ]
    asked = [(row["text"], {"until": ["."], "max_gen_toks": 6}) for row in rows]
    with computing_in(torch.float64):
        found = theirs.generate_until([Asked(args) for args in asked], disable_tqdm=True)
    for n, row in enumerate(rows):
        row["target"] = found[n] if n % 2 else words(n, 4, count=3)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
    }
    settings: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}?",
            "doc_to_target": "answer",
            "doc_to_choice": "{{choices}}",
            "num_fewshot": 2,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{long}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "generated": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{target}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}],
        },
        "continued": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text}}",
            "target_delimiter": "",
            "doc_to_target": "{{target}}",
            "metric_list": [{"metric": "acc"}],
        },
    }
    for name, one in settings.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **one}))
    return folder


class Asked:
    """What ``generate_until`` reads of a request."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def results(tasks: Path, lm: Any, **options: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        model=lm, tasks=[*TASKS], task_manager=manager, bootstrap_iters=100, **options
    )
    return found


@pytest.fixture(scope="module")
def by_theirs(tasks: Path, theirs: HFLM) -> dict[str, Any]:
    with computing_in(torch.float64):
        return results(tasks, theirs)


def numbers(found: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {
        (task, key): value
        for task, values in found["results"].items()
        for key, value in values.items()
        if "," in key
    }


def test_the_numbers_are_those_of_its_own_class(
    model: Path, tasks: Path, by_theirs: dict[str, Any]
) -> None:
    with open_lm(model, dtype="fp64") as lm:
        by_ours = results(tasks, lm)
    check(by_theirs, by_ours)
    wanted = numbers(by_theirs)
    assert 0 < wanted["generated", "exact_match,none"] < 1
    assert 0 < wanted["continued", "acc,none"] < 1
    assert 0 < wanted["choices", "acc,none"] < 1


def test_chats_are_those_of_its_own_class(model: Path, tasks: Path, theirs: HFLM) -> None:
    options = {"apply_chat_template": True, "num_fewshot": 1, "limit": 9}
    options["system_instruction"] = "say it"
    with computing_in(torch.float64):
        by_theirs = results(tasks, theirs, **options)
    with open_lm(model, dtype="fp64", chat=True) as lm:
        by_ours = results(tasks, lm, **options)
        messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox "}]
        text = theirs.apply_chat_template([*map(dict, messages)], add_generation_prompt=False)
        assert lm.apply_chat_template(messages, add_generation_prompt=False) == text
    check(by_theirs, by_ours)
    (sample,) = by_ours["samples"]["choices"][0]["arguments"][:1]
    assert "<user>" in str(sample)


def check(by_theirs: dict[str, Any], by_ours: dict[str, Any]) -> None:
    """Compare all metrics, and all logged answers."""
    wanted, got = numbers(by_theirs), numbers(by_ours)
    assert {task for task, _ in wanted} == {*TASKS}
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        compare(got[key], value)
    for task in TASKS:
        pairs = zip(by_theirs["samples"][task], by_ours["samples"][task], strict=True)
        for one, other in pairs:
            assert one["doc_id"] == other["doc_id"]
            compare(one["resps"], other["resps"])


def compare(one: Any, other: Any) -> None:
    """Numbers at 1e-10, texts and counts as they are."""
    if isinstance(one, list | tuple):
        for pair in zip(one, other, strict=True):
            compare(*pair)
    elif isinstance(one, float):
        assert abs(one - other) <= 1e-10 * abs(one)
    else:
        assert one == other


def test_the_command_prints_those_numbers(
    model: Path, tasks: Path, by_theirs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(model), "--lm-eval", ",".join(TASKS), "--lm-eval-tasks", str(tasks)]
    assert run([*words, "--dtype", "fp64", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["lm_eval"]
    wanted = numbers(by_theirs)
    got = {(one["task"], f"{one['metric']},{one['filter']}"): one["value"] for one in printed}
    assert got.keys() == {key for key in wanted if "_stderr" not in key[1]}
    for key, value in got.items():
        compare(value, wanted[key])
    assert {one["questions"] for one in printed} == {ROWS}
    assert {one["task"]: one["shots"] for one in printed}["choices"] == 2


@pytest.fixture
def refused(model: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run_it(*words: object) -> str:
        assert run(["evaluate", str(model), *map(str, words)]) == 2
        return capsys.readouterr().err

    return run_it


def test_tasks_that_cannot_be_read_are_one_message(
    tasks: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    options = ["--lm-eval-tasks", tasks]
    message = refused("--lm-eval", "choices,none", *options)
    assert f"--lm-eval: there is no task none in {tasks}" in message
    assert "there is rolling" in message
    broken = {"task": "broken", "dataset_path": "json", "output_type": "multiple_choice"}
    files = {"data_files": {"test": str(tmp_path / "none.jsonl")}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(broken | {"dataset_kwargs": files}))
    message = refused("--lm-eval", "broken", "--lm-eval-tasks", tmp_path)
    assert "these tasks of lm-eval cannot be read" in message
    assert "none.jsonl" in message
