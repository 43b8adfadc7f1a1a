"""Readers that vanish, are slow, or come in too great a number; answers that take too long."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ascend_run.ops.generation.engine import Request
from ascend_run.tools.generate.texts import Texts
from ascend_run.tools.serve.limits import Limits
from ascend_run.tools.serve.served_model import ServedModel

from .serving import SECONDS, Served, counting, until


@contextlib.contextmanager
def line_of(server: Served, receive_bytes: int = 0, **fields: Any) -> Iterator[socket.socket]:
    """Send a request and leave the connection to the test.

    Args:
        receive_bytes: Size of the socket's buffer.
    """
    body = json.dumps({"model": "tiny", "prompt": "fox", "max_tokens": 2000, **fields})
    with socket.socket() as line:
        if receive_bytes:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        line.settimeout(SECONDS)
        line.connect(("127.0.0.1", server.port))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nhost: localhost"
        line.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        yield line


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_client_that_vanishes_ends_its_sequences(texts: Texts, stream: bool, number: int) -> None:
    with counting(texts, Limits(max_unread=10_000)) as server:
        server.session.may_step.clear()
        with line_of(server, stream=stream, prompt=["fox"] * number):
            until(lambda: len(server.session.running) == number)
        until(lambda: server.session.cancelled == [*range(1, number + 1)])
        until(lambda: server.is_rid)


def test_prompts_of_one_request_are_counted_each(texts: Texts) -> None:
    with counting(texts, Limits(max_open=3)) as server:
        server.session.may_step.clear()
        with line_of(server, prompt=["fox"] * 2):
            until(lambda: len(server.session.running) == 2)
            status, answer = server.post(
                "/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1}
            )
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        until(lambda: server.is_rid)


def test_a_full_queue_refuses_a_prompt_before_it_is_encoded(texts: Texts) -> None:
    no_token = {"model": "tiny", "prompt": [9999]}
    with counting(texts, Limits(max_open=1)) as server:
        assert server.post("/v1/completions", no_token)[0] == 400
        server.session.may_step.clear()
        with line_of(server):
            until(lambda: len(server.engine.open) == 1)
            assert server.post("/v1/completions", no_token)[0] == 503
        until(lambda: server.is_rid)


def test_of_two_encoded_at_once_the_queue_takes_one(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, encoded = threading.Barrier(2), ServedModel.requests

    def requests(*words: Any) -> list[Request]:
        both.wait(SECONDS)
        return encoded(*words)

    monkeypatch.setattr(ServedModel, "requests", requests)
    with counting(texts, Limits(max_open=1)) as server, ThreadPoolExecutor(2) as threads:
        server.session.may_step.clear()
        answers = [threads.submit(server.completion, "fox") for _ in range(2)]
        until(lambda: any(one.done() for one in answers))
        server.session.may_step.set()
        assert {one.result(SECONDS)[0] for one in answers} == {200, 503}


def test_a_client_that_vanishes_within_a_stream_ends_it(texts: Texts) -> None:
    with counting(texts) as server:
        server.session.pause_after = 3
        with line_of(server, stream=True) as line:
            while b"data: " not in line.recv(4096):
                pass
        until(lambda: server.session.cancelled == [1])
        until(lambda: server.is_rid)


def test_a_stopped_stream_of_the_client_ends_its_sequence(texts: Texts) -> None:
    with counting(texts) as server:
        server.session.pause_after = 3
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS) as client:
            stream = client.completions.create(
                model="tiny", prompt="fox", max_tokens=2000, stream=True
            )
            next(iter(stream))
            stream.close()
        until(lambda: server.session.cancelled == [1])
        until(lambda: server.is_rid)


def test_a_slow_reader_ends_its_own_stream_alone(texts: Texts) -> None:
    """Its log-probabilities fill the buffers of the line, which it does not read."""
    with counting(texts, Limits(max_unread=16)) as server:
        fields = {"prompt": [5], "max_tokens": 2000, "logprobs": 5}
        with line_of(server, receive_bytes=4096, stream=True, **fields):
            until(lambda: len(server.session.submitted) == 1)
            until(lambda: server.session.cancelled == [1])
            until(lambda: server.is_rid)
            assert server.completion("fox", max_tokens=3)[0] == 200


def test_one_too_many_is_asked_to_come_again(texts: Texts) -> None:
    with counting(texts, Limits(max_open=2)) as server:
        server.session.may_step.clear()
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(server.completion, "fox") for _ in range(2)]
            until(lambda: len(server.engine.open) == 2)
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as line:
                body = json.dumps({"model": "tiny", "prompt": "fox"})
                line.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = line.getresponse()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert json.loads(answer.read())["error"]["code"] == "overloaded"
            server.session.may_step.set()
            assert [one.result(SECONDS)[0] for one in answers] == [200, 200]
        assert server.completion("fox")[0] == 200


def test_an_answer_that_takes_too_long_is_ended(texts: Texts) -> None:
    with counting(texts, Limits(max_seconds=0.1)) as server:
        server.session.may_step.clear()
        for stream in (False, True):
            status, answer = server.completion("fox", stream=stream)
            assert (status, answer["error"]["code"]) == (503, "timeout")
        until(lambda: server.session.cancelled == [1, 2])
        server.session.may_step.set()
        server.session.pause_after = 3
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS) as client:
            stream_of = client.completions.create(
                model="tiny", prompt="fox", max_tokens=2000, stream=True
            )
            with pytest.raises(openai.APIError, match=r"the answer took more than 0\.1 s"):
                list(stream_of)
        until(lambda: server.is_rid)


def test_an_engine_that_fails_is_told_to_all(texts: Texts) -> None:
    with counting(texts) as server:
        server.session.may_step.clear()
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(server.completion, "fox") for _ in range(2)]
            until(lambda: len(server.engine.open) == 2)
            server.session.failure = RuntimeError("broken")
            server.session.may_step.set()
            for one in waiting:
                status, answer = one.result(SECONDS)
                assert (status, answer["error"]["type"]) == (500, "server_error")
        assert server.completion("fox")[0] == 500, "and to those after"
        assert str(server.engine.failure) == "broken"
