"""The command: ids against transformers, sources, and messages."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from ascend_run.entrypoints.cli import run
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.text.tokenizer import train_tokenizer
from tests.support.tiny_llama import write_llama

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "in",
    "vain",
]
Answers = Callable[..., list[dict[str, Any]]]


def prompts(number: int) -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(number)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
    write_llama(path, vocab_size=tokenizer.vocab_size, eos_token_id=7)
    (path / "tokenizer.json").write_text(tokenizer.to_json())
    return path


@pytest.fixture
def answers(capsys: pytest.CaptureFixture[str], no_network: None) -> Answers:
    """Run the command with ``--json``, and without a network but this machine's own."""

    def run_it(*words: object) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert run(["generate", *map(str, words), "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run_it


def of_transformers(model: Any, ids: list[int], max_new_tokens: int) -> list[int]:
    with computing_in(torch.float64), torch.no_grad():
        found = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
    new: list[int] = found[0, len(ids) :].tolist()
    return new


def test_ids_are_those_of_transformers(folder: Path, tmp_path: Path, answers: Answers) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(texts := prompts(20)))
    found = answers(folder, "--prompts", file, "--max-new-tokens", 24, "--dtype", "fp64")
    assert [one["prompt"] for one in found] == texts
    with computing_in(torch.float64):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for one in found:
        ids = tokenizer.encode(one["prompt"]).ids
        assert one["ids"] == of_transformers(model, ids, 24)
        assert one["finish"] == ("stop" if one["ids"][-1] == 7 else "length")
        assert (one["prompt_tokens"], one["new_tokens"]) == (len(ids), len(one["ids"]))
        assert one["text"] == tokenizer.decode(one["ids"])
    for one in found[:3]:
        alone = answers(folder, one["prompt"], "--max-new-tokens", 24, "--dtype", "fp64")
        assert alone == [one]


def test_an_end_id_of_generation_config_ends_the_text(
    folder: Path, tmp_path: Path, answers: Answers
) -> None:
    import shutil

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (one,) = answers(folder, "the fox", "--max-new-tokens", 8)
    end = one["ids"][2]
    expected = one["ids"][: one["ids"].index(end) + 1]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    (other,) = answers(copy, "the fox", "--max-new-tokens", 8)
    assert (other["ids"], other["finish"]) == (expected, "stop")


def test_the_longest_text_of_the_model_ends_an_answer(folder: Path, answers: Answers) -> None:
    (one,) = answers(folder, "fox", "--max-new-tokens", 4000)
    assert one["finish"] == "stop" or one["prompt_tokens"] + one["new_tokens"] == 128


def test_a_converted_run_answers_as_its_source(
    folder: Path, tmp_path: Path, answers: Answers
) -> None:
    target = tmp_path / "run"
    assert run(["convert", "--to", "ascend-run", str(folder), str(target)]) == 0
    answer = answers(folder, "seven wizards", "--max-new-tokens", 6)
    words = ["seven wizards", "--max-new-tokens", 6, "--tokenizer", folder]
    assert [one["ids"] for one in answers(target, *words)] == [one["ids"] for one in answer]
    (checkpoint,) = (target / "checkpoints").glob("step_*")
    assert [one["ids"] for one in answers(checkpoint, *words)] == [one["ids"] for one in answer]


def test_without_json_prompt_and_answer_are_one_text(
    folder: Path, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = answers(folder, "a lazy", "--max-new-tokens", 5)
    assert run(["generate", str(folder), "a lazy", "--max-new-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "a lazy" + one["text"] + "\n"
    assert "5 new tokens in" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}/nowhere", "fox"], "no folder at"),
        (["{folder}"], "a PROMPT, or --prompts FILE"),
        (["{folder}", "fox", "--prompts", "x"], "the PROMPT 'fox' and --prompts x; give one"),
        (["{folder}", "fox", "--tokenizer", "/none"], "no tokenizer found; name one with"),
        (["{folder}", "--prompts", "/none"], "--prompts /none cannot be read: No such file"),
        (["{folder}", ""], "prompt 1 is empty, and the tokenizer adds no token"),
        (["{folder}", "fox " * 200], "and the model's longest text has 128"),
        (["{folder}", "fox", "--max-new-tokens", "0"], "max-new-tokens"),
    ],
    ids=["folder", "nothing", "both", "tokenizer", "file", "empty", "long", "no-tokens"],
)
def test_what_cannot_be_answered_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["generate", *(word.format(folder=folder) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_ranks_that_cannot_share_the_model_are_refused_before_their_start(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ascend_run.launch import agent

    monkeypatch.setattr(agent, "launch_ranks", None)
    assert run(["generate", str(folder), "fox", "--tp", "3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the model of {folder} cannot be built to generate with --tp 3")
    assert "model.num_attention_heads=4 cannot be split over" in error


def test_ids_beyond_the_vocabulary_name_the_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llama(tmp_path, vocab_size=40)
    words = ["generate", str(tmp_path), "fox", "--tokenizer", str(folder)]
    assert run(words) == 2
    assert "and the model's vocabulary has 40 ids" in capsys.readouterr().err


def test_a_stated_length_is_refused_where_it_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(folder), "fox", "--rope-length", "64"]) == 2
    assert "--rope-length 64: it goes with the RoPE scalings" in capsys.readouterr().err


def test_answers_in_bfloat16_are_of_the_length_asked(folder: Path, answers: Answers) -> None:
    (one,) = answers(folder, "the quick", "--max-new-tokens", 5, "--dtype", "bf16")
    assert one["finish"] == "stop" or one["new_tokens"] == 5


@pytest.mark.parametrize(
    ("beside_weights", "message"),
    [
        (False, "its weights take 0.0 GB in float32"),
        (True, "its cache of 128 tokens takes 0.0 GB in float32 beside weights"),
    ],
)
def test_what_exceeds_the_memory_is_refused_before_the_build(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    beside_weights: bool,
    message: str,
) -> None:
    import psutil

    from ascend_run.tools.generate import model

    class Memory:
        # The file's header is smaller than the cache.
        available = (folder / "model.safetensors").stat().st_size if beside_weights else 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.delattr(model, "built_bundle")
    assert run(["generate", str(folder), "fox", "--max-new-tokens", "500"]) == 2
    assert message in capsys.readouterr().err


def test_a_model_with_a_score_head_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert run(["generate", str(tmp_path), "the fox"]) == 2
    message = "it has a score head (model.num_labels=1) and predicts no tokens"
    assert message in " ".join(capsys.readouterr().err.split())


def test_importing_the_command_loads_no_torch() -> None:
    code = "import sys, ascend_run.tools.generate.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
