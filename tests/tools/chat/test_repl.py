"""Entries and commands, from a terminal and a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.tools.chat.lines import entries, noted_interrupts, reader
from ascend_run.tools.chat.printing import JsonPrinter, TextPrinter
from ascend_run.tools.chat.repl import Repl
from tests.support.chats import CHATML

from .scripted import ADD, HELLO, scripted
from .test_chat import CALL, OTHER, block, rendered, texts_of


@contextlib.contextmanager
def uninterrupted() -> Iterator[Callable[[], bool]]:
    yield lambda: False


def repl(chat: Any, **changes: Any) -> Repl:
    fields = {"printer": TextPrinter(), "interrupts": uninterrupted, "has_template": True}
    return Repl(chat=chat, **{**fields, **changes})


def test_a_conversation_with_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, session = scripted(tmp_path, *"abcde", template=CHATML)
    one = repl(chat)
    one.run(["x", "", "  ", "/system Be brief.", " /y", "/clear", "z", "/system", "new", "u"])
    assert capsys.readouterr() == ("a\nb\nc\nd\n", "")
    prompts = [session._texts.tokenizer.decode(prompt) for prompt in session.prompts]
    assert prompts == [
        rendered("user: x"),
        rendered("system: Be brief.", "user: x", "assistant: a", "user:  /y"),
        rendered("system: Be brief.", "user: z"),
        rendered("user: u"),
    ]
    assert one.num_refused == 0


@pytest.mark.parametrize("word", ["/exit", "exit", "quit", " q ", "/quit"])
def test_a_word_leaves(tmp_path: Path, word: str) -> None:
    chat, session = scripted(tmp_path, "a", template=CHATML)
    repl(chat).run(iter([word, "x"]))
    assert session.prompts == []


def test_help_lists_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, _ = scripted(tmp_path, "a", template=CHATML)
    one = repl(chat)
    one.run(["/help"])
    told = capsys.readouterr().err
    for command in ("/clear", "/exit", *one._commands):
        assert f"\n{command} " in f"\n{told}"


def test_what_is_not_answered_is_one_line_and_the_chat_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, session = scripted(tmp_path, "a", "b", template=CHATML, longest=64)
    one = repl(chat)
    one.run(["x", "/foo", "/tool add 3", "\udce9", "ten " * 100, "y"])
    printed = capsys.readouterr()
    assert printed.out == "a\nb\n"
    for line, message in zip(
        printed.err.splitlines(),
        ("no command /foo; /help", "/tool add: no call without", "no text in UTF-8", "shorten it"),
        strict=True,
    ):
        assert line.startswith("not answered: ")
        assert message in line
    assert one.num_refused == 4
    assert texts_of(session) == rendered("user: x", "assistant: a", "user: y")


def test_calls_are_shown_and_their_results_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [f"I add.{block(CALL)}{block(OTHER)}", "It is three.", block(CALL), "four"]
    chat, session = scripted(tmp_path, *answers, tools=[ADD, HELLO])
    repl(chat).run(["x", "/tool other 3", "/tool hello", "/tool add 3 or so", "y", "/tool add 4"])
    printed = capsys.readouterr()
    assert printed.out == (
        'I add.\n[call] add {"a": 1}\n[call] hello {}\nIt is three.\n[call] add {"a": 1}\nfour\n'
    )
    assert printed.err.splitlines() == [
        "give results of calls with /tool NAME RESULT",
        "not answered: /tool other: no call without a result; expected one of add, hello",
    ]
    second = session._texts.tokenizer.decode(session.prompts[1])
    assert second.endswith(
        "<|im_start|>tool\n(hello, call00001)<|im_end|>\n"
        "<|im_start|>tool\n3 or so(add, call00000)<|im_end|>\n<|im_start|>assistant\n"
    )


def test_dropped_turns_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, _ = scripted(tmp_path, *"abcd", template=CHATML, longest=64)
    repl(chat).run(["x and then five"] * 4)
    assert capsys.readouterr().err == (
        "the oldest turns are dropped: they do not fit into the longest text\n"
    )


def test_json_has_an_object_for_each_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, session = scripted(tmp_path, "a", f"b{block(CALL)}", tools=[ADD])
    repl(chat, printer=JsonPrinter(session._texts)).run(["x", "/f\udce9", "y"])
    printed = capsys.readouterr()
    first, refused, second = map(json.loads, printed.out.splitlines())
    ids = session.answers
    assert first == {
        "message": "x",
        "text": "a",
        "ids": ids[0],
        "finish": "stop",
        "prompt_tokens": len(session.prompts[0]),
        "cached_tokens": 0,
        "new_tokens": 2,
    }
    assert (refused.keys(), refused["message"]) == ({"message", "error"}, "/f\udce9")
    assert (second["text"], second["finish"]) == (f"b{block(CALL)}", "tool_calls")
    assert second["tool_calls"] == [{"id": "call00000", "type": "function", "function": CALL}]
    assert second["cached_tokens"] > 0


class Terminal(io.StringIO):
    """Lines that are typed, with what is shown before each; an exception in place of a line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
        super().__init__()
        self.lines, self.shown = [*lines], ""
        monkeypatch.setattr(sys, "stdin", self)
        monkeypatch.setattr("builtins.input", self.typed)

    def isatty(self) -> bool:
        return True

    def typed(self, prompt: str) -> str:
        self.shown += prompt
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def test_a_terminal_is_asked_with_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that ends with a backslash goes on in the next; Ctrl-D ends the last one."""
    terminal = Terminal(monkeypatch, "a", "b\\", "  c\\", "d", "e\\")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert [*entries(reader())] == ["a", "b\n  c\nd", "e\\"]
    assert terminal.shown == "> > ... ... > ... > "


def test_a_prompt_is_not_shown_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, "a")
    assert [*entries(reader())] == ["a"]
    assert terminal.shown == ""


def test_an_interrupt_at_the_prompt_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    Terminal(monkeypatch, "a", KeyboardInterrupt)
    found = entries(reader())
    assert next(found) == "a"
    with pytest.raises(KeyboardInterrupt):
        next(found)


def test_each_line_of_a_pipe_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"a\r\n\nb\xff\\\nc"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
    assert [*entries(reader())] == ["a", "", "b\udcff\nc"]


def test_the_first_interrupt_ends_an_answer_and_the_second_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, session = scripted(tmp_path, "hello again", "b", "c", template=CHATML)
    before = signal.getsignal(signal.SIGINT)
    one = repl(chat, interrupts=noted_interrupts)
    session.on_token = lambda: signal.raise_signal(signal.SIGINT)
    one.run(["x"])
    assert signal.getsignal(signal.SIGINT) is before
    said = capsys.readouterr().out
    assert said.endswith("\n")
    assert "hello again".startswith(said[:-1])
    session.on_token = lambda: None
    one.run(["y"])
    assert texts_of(session) == rendered("user: x", f"assistant: {said[:-1]}", "user: y")
    session.on_token = lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        one.run(["z"])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_model_without_a_template_has_no_system_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, session = scripted(tmp_path, "ello", template=None)
    repl(chat, has_template=False).run(["/system Be brief.", "h"])
    assert capsys.readouterr().err == (
        "not answered: /system needs a chat template, and there is none\n"
    )
    assert attrs.astuple(chat.conversation, recurse=False)[0] is None
    assert texts_of(session) == "h"
