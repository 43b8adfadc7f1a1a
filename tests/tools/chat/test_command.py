"""The command with a model of random weights: answers are those of ``generate``."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ascend_run.entrypoints.cli import run
from ascend_run.ops.generation import engine
from tests.support.chats import CHATML, bytes_tokenizer, write_tokenizer
from tests.support.tiny_llama import write_llama

from .scripted import ADD
from .test_repl import Terminal

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

Records = list[dict[str, Any]]
Talk = Callable[..., Records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_tokenizer(path, CHATML)
    write_llama(path, bytes_tokenizer().get_vocab_size(), max_position_embeddings=256)
    return path


@pytest.fixture
def plain(folder: Path, tmp_path: Path) -> Path:
    """The same without a template."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    return tmp_path


@pytest.fixture
def talk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_network: None
) -> Talk:
    """Run the command with ``--json`` and lines in a pipe, without a network."""

    def talk(lines: list[str], *words: object, code: int = 0) -> Records:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        assert run(["chat", *map(str, words), "--json"]) == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return talk


def generated(capsys: pytest.CaptureFixture[str], folder: Path, prompt: str, *words: str) -> Any:
    capsys.readouterr()
    assert run(["generate", str(folder), prompt, *words, "--dtype", "fp64", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_answers_are_those_to_what_transformers_renders(
    folder: Path, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["What is the capital?", "one two", "and then"]
    found = talk(lines, folder, "--system", "The fox.", "--max-new-tokens", 9, "--dtype", "fp64")
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "The fox."}]
    for at, (line, one) in enumerate(zip(lines, found, strict=True)):
        messages.append({"role": "user", "content": line})
        prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        messages.append({"role": "assistant", "content": one["text"]})
        assert (one["message"], one["new_tokens"]) == (line, 9)
        assert (one["cached_tokens"] > 20) == (at > 0)
        if at == 2:
            same = generated(capsys, folder, prompt, "--max-new-tokens", "9")
            for name in ("ids", "text", "finish", "prompt_tokens"):
                assert one[name] == same[name]


@pytest.mark.parametrize("words", [[], ["--temperature", "1.5", "--seed", "3"]], ids=str)
def test_answers_do_not_depend_on_the_cache(
    folder: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    lines = ["hello", "again", "/clear", "hello", "three four five", "six"]
    options = [folder, "--max-new-tokens", 12, "--dtype", "fp64", *words]
    found = talk(lines, *options)
    monkeypatch.setattr(engine, "_num_common", lambda ids, others: 0)
    alone = talk(lines, *options)
    for one, same in zip(found, alone, strict=True):
        assert same.pop("cached_tokens") == 0
        assert one.pop("cached_tokens") > 0 or one is found[0]
        assert one == same
    assert (found[0]["ids"] == found[2]["ids"]) == (not words), "each answer has its own draws"


def test_without_a_template_it_says_so_once_and_continues_the_text(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is\nthe fox"))
    words = ["--max-new-tokens", "4", "--dtype", "fp64"]
    assert run(["chat", str(plain), *words]) == 0
    printed = capsys.readouterr()
    first = generated(capsys, plain, "What is", "--max-new-tokens", "4")["text"]
    text = f"What is{first}\nthe fox"
    second = generated(capsys, plain, text, "--max-new-tokens", "4")["text"]
    assert printed.out == f"{first}\n{second}\n"
    assert printed.err == (
        f"each line continues the text as it is typed: {plain} has no chat template; --template "
        "names one\n"
    )


def test_a_terminal_ends_an_answer_by_an_interrupt_and_leaves_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(monkeypatch, "hello", "again", KeyboardInterrupt)
    step, steps = engine.Engine.step, []

    def interrupted(self: engine.Engine) -> Any:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(engine.Engine, "step", interrupted)
    assert run(["chat", str(folder), "--max-new-tokens", "8"]) == 130
    assert len(steps) == 3 + 8
    printed = capsys.readouterr()
    assert printed.err == "/help lists commands\n\ninterrupted\n"


def test_a_message_that_is_refused_is_an_error_of_a_pipe(folder: Path, talk: Talk) -> None:
    found = talk(["x", "fox " * 400, "y"], folder, "--max-new-tokens", 2, code=2)
    assert [*map(len, found)] == [7, 2, 7]
    assert "the longest text here has 256" in found[1]["error"]
    (one,) = talk(["x " * 30], folder, "--cache-tokens", 32, code=2)
    assert "the longest text here has 32" in one["error"]


def test_log_probabilities_and_a_stop_word(folder: Path, talk: Talk) -> None:
    words = [folder, "--max-new-tokens", 6, "--dtype", "fp64"]
    (one,) = talk(["hello"], *words, "--logprobs", 1)
    assert [each["id"] for each in one["logprobs"]] == one["ids"]
    assert all(each["top"][0]["logprob"] == each["logprob"] for each in one["logprobs"]), "greedy"
    stop = one["text"][2:4]
    (other,) = talk(["hello"], *words, "--stop", stop)
    assert (other["text"], other["finish"]) == (one["text"][: one["text"].index(stop)], "stop")


def test_ids_beyond_the_vocabulary_name_the_tokenizer(
    folder: Path, tmp_path: Path, talk: Talk
) -> None:
    write_llama(tmp_path, vocab_size=40)
    (one,) = talk(["fox"], tmp_path, "--tokenizer", folder, code=2)
    assert "and the model's vocabulary has 40 ids; name the model's own tokenizer" in one["error"]


def test_the_seed_of_draws_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(["chat", str(folder), "--temperature", "1"]) == 0
    assert capsys.readouterr().err.startswith("seed ")


def test_all_problems_of_the_options_are_one_message(
    folder: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([ADD]))
    options = ["--temperature", "-1", "--logprobs", "1", "--tools", str(tools)]
    assert run(["chat", str(plain), *options, "--system", "x"]) == 2
    assert capsys.readouterr().err == (
        "error: the chat cannot begin:\n"
        "  --logprobs: no effect without --json\n"
        "  --temperature -1.0: expected a number at least 0; 0 takes the most probable\n"
        f"  --system, --tools: {plain} has no chat template; --template names one\n"
    )
    assert run(["chat", str(plain), "--tokenizer", "/none", "--system", "x", "--min-p", "2"]) == 2
    assert capsys.readouterr().err == (
        "error: the chat cannot begin:\n"
        "  --min-p 2.0: expected a number from 0 to 1\n"
        "  no tokenizer found; name one with --tokenizer: no /none\n"
    )
    assert run(["chat", str(folder), "--tools", str(tools)]) == 2
    assert "--tools: " in (told := capsys.readouterr().err)
    assert "has no form for tools; name another with --template" in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("[", "is no JSON: "),
        ("{}", "expected a list of {"),
        ("[]", "expected a list of {"),
        ('[{"name": 3}]', "expected a list of {"),
        ('[{"type": "function", "function": {}}, 3]', "expected a list of {"),
    ],
    ids=["none", "no-json", "object", "empty", "name", "function"],
)
def test_tools_that_are_no_functions_are_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    message: str,
) -> None:
    file = tmp_path / "tools.json"
    if content is not None:
        file.write_text(content)
    assert run(["chat", str(folder), "--tools", str(file)]) == 2
    assert f"  --tools {file}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}/nowhere"], "no folder at"),
        (["{folder}", "--tokenizer", "/none"], "no tokenizer found; name one with"),
        (["{folder}", "--template", "none"], "--template='none': expected one of"),
        (["{folder}", "--template", "chatglm2", "--system", "x"], None),
        (["{folder}", "--history-turns", "-1"], "-1 is not in the range"),
        (["{folder}", "--rope-length", "9"], "--rope-length 9: it goes with the RoPE scalings"),
        (["{folder}", "--cache-tokens", "9999999999"], "--cache-tokens 9999999999 take"),
    ],
    ids=["folder", "tokenizer", "template", "named", "turns", "rope", "cache"],
)
def test_what_cannot_begin_is_one_message(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str | None,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code = run(["chat", *(word.format(folder=folder) for word in words)])
    assert code == (0 if message is None else 2)
    assert (message or "") in capsys.readouterr().err


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from ascend_run.entrypoints.cli import run; run(['chat', '--help']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert b"--history-turns" in done.stdout
