"""The command: how it starts, what it says, and how it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.tools.generate.texts import Texts
from ascend_run.tools.serve import server
from ascend_run.tools.serve.opening import ServeQuestion

from .serving import TEMPLATE, CountingSession, asked, counting_model, post, until


class Command:
    """Runs the command in this thread, and something else once it serves."""

    def __init__(self, session: CountingSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.question: ServeQuestion | None = None
        self.listener: socket.socket | None = None
        self.template: str | None = TEMPLATE

        @contextlib.contextmanager
        def opened(question: ServeQuestion) -> Iterator[tuple[Any, CountingSession]]:
            self.question = question
            yield counting_model(session.texts, self.template), session

        def listening(host: str, port: int) -> socket.socket:
            self.listener = found(host, port)
            return self.listener

        found = server.listening
        monkeypatch.setattr(server, "opened", opened)
        monkeypatch.setattr(server, "listening", listening)

    def run(self, *words: str, then: Any, number: int = signal.SIGINT) -> tuple[int, Any]:
        """Return the exit code, and what ``then`` returned of the port; a signal ends it."""
        result = []

        def meanwhile() -> None:
            try:
                until(lambda: self.listener is not None)
                assert self.listener is not None
                result.append(then(self.listener.getsockname()[1]))
            finally:
                os.kill(os.getpid(), number)

        thread = threading.Thread(target=meanwhile)
        thread.start()
        code = run(["serve", "models/tiny", "--port", "0", *words])
        thread.join(10)
        return code, result[0]


@pytest.fixture
def command(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(CountingSession(texts), monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(
    command: Command, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    before = signal.getsignal(number)
    code, ((status, answer), (of_another_host, _)) = command.run(
        then=lambda port: [
            asked(port, "GET", "/v1/models"),
            asked(port, "GET", "/v1/models", host="evil.example"),
        ],
        number=number,
    )
    assert (code, status, answer["data"][0]["id"], of_another_host) == (0, 200, "tiny", 403)
    assert signal.getsignal(number) is before
    assert command.question is not None
    assert (command.question.model, command.question.name) == (Path("models/tiny"), None)
    told = capsys.readouterr().err
    assert told.startswith("tiny is served at http://127.0.0.1:")
    assert "anyone" not in told
    assert "template" not in told


def test_a_model_that_does_not_chat_is_told(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.template = None
    command.run(then=lambda port: asked(port, "GET", "/v1/models"))
    assert "it has no chat template, so it does not chat: there is none" in capsys.readouterr().err


def test_options_reach_the_server(command: Command, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    words = ["--api-key-file", str(key), "--max-new-tokens", "3", "--name", "other"]
    words += ["--rope-length", "64"]

    def ask(port: int) -> list[tuple[int, Any]]:
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 4}
        return [
            post(port, "/v1/completions", body),
            post(port, "/v1/completions", body, authorization="Bearer secret"),
        ]

    _, (without, beside) = command.run(*words, then=ask)
    assert without[0] == 401
    assert (beside[0], beside[1]["error"]["param"]) == (400, "max_tokens")
    assert command.question is not None
    assert (command.question.name, command.question.rope_length) == ("other", 64)


def test_an_open_server_without_a_key_says_so(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run("--host", "0.0.0.0", then=lambda port: asked(port, "GET", "/v1/models"))
    assert "anyone who reaches this address can use it: no --api-key" in capsys.readouterr().err


def test_an_engine_that_fails_ends_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CountingSession) -> list[Any]:
        raise MemoryError("no memory")

    monkeypatch.setattr(CountingSession, "step", fail)
    monkeypatch.setattr(os, "kill", lambda *words: None)  # it ends by itself
    body = {"model": "tiny", "prompt": "fox"}
    with pytest.raises(MemoryError, match="no memory"):
        command.run(then=lambda port: post(port, "/v1/completions", body))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", "a", "--api-key-file", "b"], "both name a key; give one"),
        (["--api-key", " "], "the API key of --api-key is empty"),
        (["--api-key-file", "/none"], "--api-key-file /none cannot be read: No such file"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1 --port 8000: "),
        (["--port", "70000"], "70000 is not in the range"),
        (["--max-seconds", "0"], "0.0 is not in the range"),
        (["--port", "0"], "no folder at /none"),
    ],
    ids=["keys", "empty", "file", "host", "port", "seconds", "model"],
)
def test_what_cannot_be_served_is_one_message(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(["serve", "/none", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with server.listening("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        assert run(["serve", "/none", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; name another" in capsys.readouterr().err


def test_without_its_packages_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["serve", "/none"]) == 2
    assert capsys.readouterr().err == (
        "error: the server needs packages that are not installed:\n"
        "  starlette, uvicorn: pip install 'ascend-run[serve]'\n"
    )


def test_importing_the_command_loads_no_library() -> None:
    code = (
        "import sys, ascend_run.tools.serve.command; "
        "assert not {'torch', 'starlette', 'uvicorn'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
