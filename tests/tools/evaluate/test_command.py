"""The command with a model: log-probabilities of transformers, forms, messages."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from ascend_run.entrypoints.cli import run
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.evaluate.asking import ScoredBy, TaskOptions
from ascend_run.tools.evaluate.prompts import Form, Prompt
from ascend_run.tools.evaluate.stored_model import StoredModel, chat_template
from ascend_run.tools.evaluate.tasks import TASKS
from ascend_run.tools.generate.model import loaded_model
from ascend_run.tools.generate.texts import open_texts
from tests.support.tiny_llama import write_llama
from tests.tools.evaluate.fixed_model import write_jsonl, write_mmlu

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
PAIRS = [("the quick", " fox"), ("the quick", " dog over"), ("a", " wizard"), ("a", "b")]


@contextmanager
def opened(folder: Path) -> Iterator[StoredModel]:
    texts = open_texts(None, [folder], None)
    with loaded_model(folder, SourceOptions(), torch.float64) as model:
        yield StoredModel(model=model, texts=texts)


@pytest.fixture
def stored(folder: Path) -> Iterator[StoredModel]:
    with opened(folder) as model:
        yield model


def test_log_probabilities_are_those_of_transformers(folder: Path, stored: StoredModel) -> None:
    with computing_in(torch.float64), torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        wanted = []
        for prompt, text in PAIRS:
            begin = len(tokenizer.encode(prompt).ids)
            ids = torch.tensor(tokenizer.encode(prompt + text).ids)
            scores = reference(ids[None, :-1]).logits[0].log_softmax(-1)
            each = scores.gather(1, ids[1:, None])[:, 0]
            wanted.append(float(each[begin - 1 :].sum()))
    got = [*stored.log_probabilities([(Prompt(text=p), text) for p, text in PAIRS * 100])]
    torch.testing.assert_close(got, wanted * 100, rtol=0, atol=1e-10)


def test_answers_are_those_of_generate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, whatever ends first; a stop word is not part of an answer."""
    words = ["the quick brown", "a", "fox jumps over a lazy", *["lazy dog"] * 14]
    (tmp_path / "prompts").write_text("\n".join(words))
    command = ["generate", str(folder), "--prompts", str(tmp_path / "prompts"), "--dtype", "fp64"]
    assert run([*command, "--max-new-tokens", "5", "--json"]) == 0
    wanted = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    with opened(folder) as stored:
        assert [*stored.answers([Prompt(text=word) for word in words], 5, ())] == wanted
        stop = wanted[0][2:4]
        got = [*stored.answers([Prompt(text=words[0])], 5, (stop,))]
    assert got == [wanted[0].split(stop)[0]]


def test_answers_are_drawn_by_their_seed(stored: StoredModel) -> None:
    """Equal prompts have different draws."""

    def drawn(seed: int) -> list[str]:
        sampling = Sampling(temperature=5.0, seed=seed)
        return [*stored.answers([Prompt(text="the quick")] * 2, 5, (), sampling)]

    first, second = drawn(1)
    assert drawn(1) == [first, second]
    assert first != second
    assert drawn(2) != [first, second]


def test_a_chat_is_rendered_by_the_template_of_the_model(
    folder: Path, tmp_path: Path, stored: StoredModel
) -> None:
    import attrs

    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chatting = attrs.evolve(stored, template=chat_template(tmp_path))
    turns = Prompt(turns=("the", "fox", "a"))
    text = Prompt(text="<user>the<assistant>fox<user>a<a>")
    got = [*chatting.log_probabilities([(turns, "B"), (text, "B")])]
    assert got[0] == got[1]
    assert [*chatting.answers([turns], 4, ())] == [*stored.answers([text], 4, ())]


def test_benchmarks_and_perplexity_are_one_object(
    folder: Path, tmp_path: Path, evaluate: Callable[..., Any]
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox")
    write_jsonl(tmp_path / "test.jsonl", [{"question": "a dog", "answer": "#### 1"}] * 2)
    words = [folder, tmp_path / "a.txt", "--task", f"gsm8k={tmp_path}", "--max-new-tokens", 3]
    found = evaluate(*words, "--task", f"mmlu={write_mmlu(tmp_path / 'mmlu')}", "--shots", 0)
    assert [one["name"] for one in found["perplexity"]] == [str(tmp_path / "a.txt")]
    assert [(one["task"], one["questions"]) for one in found["tasks"]] == [
        ("gsm8k", 2),
        ("mmlu", 4),
    ]
    assert [one["scored_by"] for one in found["tasks"]] == ["text", "logprob"]
    for one in found["tasks"]:
        assert sum(subject["correct"] for subject in one["subjects"]) == one["correct"]
        assert one["accuracy"] == one["correct"] / one["questions"]


def test_results_are_a_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = f"mmlu={write_mmlu(tmp_path)}"
    assert run(["evaluate", str(folder), "--task", task, "--shots", "0"]) == 0
    title, header, _, first, second, total = capsys.readouterr().out.splitlines()
    assert title == "mmlu: form direct, scored by logprob"
    assert header.split() == ["subject", "questions", "correct", "accuracy", "error"]
    rows = [line.split() for line in (first, second, total)]
    assert [row[:2] for row in rows] == [
        ["abstract_algebra", "3"],
        ["virology", "1"],
        ["total", "4"],
    ]
    assert sum(int(row[2]) for row in rows[:2]) == int(rows[2][2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to evaluate: MODEL and DATA, --task NAME=PATH or --lm-eval NAME"),
        (["--task", "mlu=x"], "--task mlu=x: expected NAME=PATH with NAME one of agieval"),
        (["--task", "mmlu={mmlu}", "--form", "chat"], "chat template"),
        (["--task", "mmlu={mmlu}", "--shots", "-1"], "shots"),
    ],
    ids=["nothing", "task", "chat", "shots"],
)
def test_what_cannot_be_evaluated_is_one_message(
    folder: Path, tmp_path: Path, refused: Callable[..., str], options: list[str], message: str
) -> None:
    mmlu = write_mmlu(tmp_path)
    assert message in refused(folder, *(option.format(mmlu=mmlu) for option in options))


def test_models_that_cannot_answer_are_refused(
    folder: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    task = f"mmlu={write_mmlu(tmp_path / 'mmlu')}"
    write_llama(tmp_path, vocab_size=40)
    message = refused(tmp_path, "--task", task, "--tokenizer", folder)
    assert "and the model's vocabulary has 40 ids; name the model's own tokenizer" in message
    assert "no folder at" in refused(tmp_path / "none", "--task", task)


def test_the_options_name_every_task_form_and_score() -> None:
    from ascend_run.tools.evaluate.command import command

    by_name = {option.name: option for option in command.params}
    assert ", ".join(sorted(TASKS)) in by_name["tasks"].help  # type: ignore[attr-defined]
    for name, members in (("form", Form), ("scored_by", ScoredBy)):
        option = by_name[name]
        assert [*option.type.choices] == [*members]  # type: ignore[attr-defined]
        assert option.default == getattr(TaskOptions(), name)


def test_importing_the_command_and_the_tasks_loads_no_torch() -> None:
    code = (
        "import sys, ascend_run.tools.evaluate.command, ascend_run.tools.evaluate.judging; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
