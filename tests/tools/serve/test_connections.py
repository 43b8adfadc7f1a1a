"""Connections that say nothing are closed, and only so many are open."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from ascend_run.tools.generate.texts import Texts
from ascend_run.tools.serve import limits as limits_module
from ascend_run.tools.serve.limits import Limits

from .serving import SECONDS, Served, asked, counting, until

HEAD = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST %s HTTP/1.1\r\ncontent-type: application/json\r\nhost: localhost\r\n"
BODY = b'{"model": "tiny", "prompt": "fox", "max_tokens": 1}'


@pytest.fixture(scope="module")
def hasty(texts: Texts) -> Iterator[Served]:
    with counting(texts, Limits(max_head_seconds=0.1)) as server:
        yield server


def connected(server: Served) -> contextlib.closing[socket.socket]:
    return contextlib.closing(socket.create_connection(("127.0.0.1", server.port), SECONDS))


def rest(line: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (HEAD, 0),
        (HEAD + b"\r\n" + HEAD, 1),
        (HEAD + b"\r\n" + HEAD + b"\r\n" + HEAD, 2),
        (POST % b"/none" + b"content-length: 99\r\n\r\n{", 1),
    ],
    ids=["nothing", "half a head", "half a second one", "half a third one", "a refused body"],
)
def test_a_connection_that_says_no_more_is_closed(hasty: Served, sent: bytes, answers: int) -> None:
    with connected(hasty) as line:
        line.sendall(sent)
        if answers:  # what comes after an answer ends uvicorn's own time of idle connections
            first = line.recv(1)
            line.sendall(b"x")
            assert (first + rest(line)).count(b"HTTP/1.1") == answers
        else:
            assert rest(line) == b""


def test_a_slow_answer_and_a_slow_body_are_waited_for(hasty: Served) -> None:
    hasty.session.may_step.clear()
    with connected(hasty) as line:
        line.sendall(POST % b"/v1/completions" + b"connection: close\r\n")
        line.sendall(b"content-length: %d\r\n\r\n" % len(BODY))
        time.sleep(0.15)
        line.sendall(BODY)
        time.sleep(0.15)
        hasty.session.may_step.set()
        assert rest(line).startswith(b"HTTP/1.1 200")


def test_too_many_connections_are_refused(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_MOST_OTHERS", 1)
    limits = Limits(max_open=1, max_head_seconds=2 * SECONDS)
    assert limits.max_connections == 2
    with counting(texts, limits) as server, contextlib.ExitStack() as lines:
        kept, *_ = [lines.enter_context(connected(server)) for _ in range(2)]
        status, answer = asked(server.port, "GET", "/v1/models")
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        told = lines.enter_context(connected(server))
        told.sendall(HEAD + b"\r\n")
        answer = rest(told)
        assert b"retry-after: 1" in answer
        assert b"connection: close" in answer
        for _ in range(2):
            lines.enter_context(connected(server))
        with connected(server) as line:
            line.sendall(HEAD)
            assert rest(line) == b"", "closed at once"
        kept.sendall(HEAD + b"connection: close\r\n\r\n")
        assert rest(kept).startswith(b"HTTP/1.1 200")
        lines.close()
        until(lambda: asked(server.port, "GET", "/v1/models")[0] == 200)
