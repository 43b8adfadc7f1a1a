"""What is not answered: one clear error in OpenAI's form, and nothing is left of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.tools.generate.texts import Texts
from ascend_run.tools.serve.errors import ApiError
from ascend_run.tools.serve.fields import Fields, parsed
from ascend_run.tools.serve.limits import Limits

from .serving import SECONDS, Served, asked, counting

BASE = {"model": "tiny", "prompt": "fox"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": "a", "type": "function", "function": function}


CALL = _call("{}")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": None}, "model", "model is missing; /v1/models names it"),
        ({"model": 3}, "model", "model=3: expected a string"),
        ({"prompt": None}, "prompt", "prompt=null: expected a string, or a list of token ids"),
        ({"prompt": []}, "prompt", "prompt=[]: expected"),
        ({"prompt": [1, "a"]}, "prompt", 'prompt=[1, "a"]: expected'),
        ({"prompt": [True]}, "prompt", "prompt=[true]: expected"),
        ({"prompt": ["a", [5, "b"]]}, "prompt", 'prompt=["a", [5, "b"]]: expected'),
        ({"prompt": ["a", ""]}, "prompt", "prompt[1] is empty, and the tokenizer adds no token"),
        ({"prompt": [[5], [272]]}, "prompt", "the token id 272 of prompt[1] is none of the"),
        ({"prompt": ["a"] * 300}, "prompt", "300 prompts in one request, and at most 272 are"),
        ({"prompt": ""}, "prompt", "prompt is empty, and the tokenizer adds no token"),
        ({"prompt": [272]}, "prompt", "the token id 272 of prompt is none of the model's: it has"),
        ({"prompt": [5, -1]}, "prompt", "the token id -1 of prompt"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: expected an integer of at least 1"),
        ({"max_tokens": True}, "max_tokens", "max_tokens=true: expected an integer"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens=1.5: expected an integer"),
        ({"max_tokens": 2048}, "prompt", "and the longest text here has 2048; shorten"),
        ({"n": 2}, "n", "n=2 is not supported; leave it out"),
        ({"n": True}, "n", "n=true is not supported"),
        ({"best_of": 3}, "best_of", "best_of=3 is not supported"),
        ({"echo": True}, "echo", "echo=true is not supported"),
        ({"suffix": "x"}, "suffix", 'suffix="x" is not supported'),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "is not supported"),
        ({"temperature": -1}, "temperature", "temperature=-1: expected a number of at least 0"),
        ({"temperature": "hot"}, "temperature", 'temperature="hot": expected a number'),
        ({"top_p": 1.5}, "top_p", "top_p=1.5: expected a number from 0 to 1"),
        ({"top_k": -1}, "top_k", "top_k=-1: expected an integer of at least 0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
        ({"seed": 2**63}, "seed", "expected an integer from -9223372036854775808"),
        ({"logprobs": 6}, "logprobs", "logprobs=6: expected an integer from 0 to 5"),
        ({"stop": ["a"] * 5}, "stop", "expected a string, or a list of at most 4"),
        ({"stop": [""]}, "stop", 'stop=[""]: expected a string, or a list of at most 4'),
        ({"stop": 7}, "stop", "stop=7: expected"),
        ({"stream": "yes"}, "stream", 'stream="yes": expected true or false'),
        ({"stream_options": {}}, "stream_options", "and stream=true beside it"),
        ({"max_token": 5}, "max_token", 'unknown field "max_token"; leave it out'),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:40],
)
def test_a_wrong_field_is_named(
    tiny: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    status, answer = tiny.post("/v1/completions", {**BASE, **fields})
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages=null: expected a list of at least one message"),
        ({"messages": []}, "messages=[]: expected"),
        ({"messages": ["Hi"]}, 'messages[0]="Hi": expected an object with role and content'),
        ({"messages": [{"role": "bot", "content": "x"}]}, 'messages[0].role="bot": expected one'),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
            'messages[0].tool_call_id="a": expected the id of a call in an earlier message',
        ),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": [[1]]}]},
            "messages[0].tool_call_id=[[1]]: expected the id of a call",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": 3}]},
            "messages[0].tool_calls=3: expected a list of calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}]},
            "messages[0].tool_calls[0]={",
        ),
        *(
            (
                {"messages": [{"role": "assistant", "tool_calls": [_call(arguments)]}]},
                "messages[0].tool_calls[0]={",
            )
            for arguments in ("[]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 5000, {"a": 1})
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "tool_calls=[{",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content=null: expected a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]=",
        ),
        ({"messages": [{"role": "user", "content": "x", "to": 1}]}, 'unknown field "to"'),
        ({"tools": [{"type": "function"}]}, "tools[0]={"),
        ({"tools": {"name": "add"}}, "tools={"),
        ({"tools": [ADD]}, "the chat template of the model has no form for tools"),
        ({"tools": [ADD], "tool_choice": "required"}, 'tool_choice="required" is not supported'),
        ({"response_format": {"type": "json_object"}}, "response_format={"),
        ({"top_logprobs": 2}, "top_logprobs: no effect without logprobs=true"),
        ({"logprobs": 2}, "logprobs=2: expected true or false"),
        ({"prompt": "x"}, 'unknown field "prompt"'),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:40],
)
def test_a_wrong_field_of_a_chat_is_named(
    tiny: Served, fields: dict[str, Any], message: str
) -> None:
    status, answer = tiny.post("/v1/chat/completions", {**CHAT, **fields})
    assert status == 400
    assert message in answer["error"]["message"]


def test_fields_that_change_nothing_pass(tiny: Served) -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0, "user": "me"}
    assert tiny.completion("fox", logit_bias={}, stop=None, seed=None, **neutral)[0] == 200
    chat = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "auto", "n": 1}
    assert tiny.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, **chat})[0] == 200


def test_another_model_is_not_found(tiny: Served) -> None:
    status, answer = tiny.completion("fox", model="gpt")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is no JSON in UTF-8: Expecting value"),
        (b"{", "the body is no JSON in UTF-8"),
        (b"[]", "the body is no JSON object"),
        (b'"\xff"', "the body is no JSON in UTF-8: 'utf-8' codec can't decode"),
        (b'{"prompt": NaN}', "NaN is no number"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
        (b'{"a":' * 100_000, "the body is nested too deeply"),
        (b'{"model": ' + b"9" * 5000 + b"}", "the body is no JSON in UTF-8: Exceeds the limit"),
    ],
    ids=["empty", "cut", "list", "bytes", "nan", "surrogate", "deep", "digits"],
)
def test_a_body_that_is_no_object_is_refused(tiny: Served, content: bytes, message: str) -> None:
    status, answer = tiny.post("/v1/completions", content)
    assert status == 400
    assert message in answer["error"]["message"]


TEXTS = st.sampled_from(["", "a", "tiny", "\ud800", "\x00"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(TEXTS, VALUES, max_size=2)
NAMES = st.sampled_from(
    ["model", "prompt", "max_tokens", "stop", "stream", "stream_options", "logprobs", "seed", "n"]
)


@settings(max_examples=30)
@given(body=st.binary(max_size=60) | st.dictionaries(NAMES, JSON, max_size=6).map(json.dumps))
def test_no_body_fails_otherwise_than_as_wrong(body: bytes | str) -> None:
    from ascend_run.tools.serve.asked import asked_chat, asked_completion

    content = body.encode() if isinstance(body, str) else body
    for read in (asked_completion, asked_chat):
        with contextlib.suppress(ApiError):
            read(parsed(content))


SOME = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "text", "\x00"]),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.sampled_from(["type", "a"]), one),
    max_leaves=3,
)
ARGUMENTS = st.sampled_from(["{}", '{"a": "\\ud800"}', '{"\\ud800": 1e999}']) | SOME
CALLS = st.lists(ARGUMENTS.map(_call), max_size=2)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.just("x") | SOME},
    optional={"tool_calls": CALLS | SOME, "tool_call_id": st.just("a") | SOME, "name": SOME},
)
TOOLS = st.fixed_dictionaries({"name": st.just("add"), "parameters": SOME}, optional={"a": SOME})


@settings(max_examples=60)
@given(
    messages=st.lists(TURNS, min_size=1, max_size=2),
    tools=st.lists(TOOLS.map(lambda one: {"type": "function", "function": one}), max_size=2) | SOME,
)
def test_no_chat_fails_otherwise_than_as_wrong(
    calling: Served, messages: list[Any], tools: Any
) -> None:
    fields = {"model": "tiny", "messages": messages, "tools": tools, "max_tokens": 1}
    status, answer = calling.post("/v1/chat/completions", fields)
    assert status in (200, 400), answer


def test_a_null_field_counts_as_left_out() -> None:
    assert Fields({"n": None}).any("n") is None
    Fields({"n": None}).finish()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v2", 404),
        ("GET", "/v1/models/none", 404),
    ],
)
def test_another_path_or_method_is_refused(
    tiny: Served, method: str, path: str, status: int
) -> None:
    found, answer = asked(tiny.port, method, path)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")


def test_another_type_of_body_is_refused(tiny: Served) -> None:
    """A page of another site can send these without asking the browser's user."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, answer = tiny.post("/v1/completions", BASE, content_type=kind)
        assert status == 415, kind
        assert "expected application/json" in answer["error"]["message"]
    assert (
        tiny.post("/v1/completions", BASE, content_type="application/json; charset=utf-8")[0] == 200
    )


def test_a_body_that_is_too_large_is_not_parsed(tiny: Served) -> None:
    for size, status in ((1 << 20, 200), ((1 << 20) + 1, 413), (3 << 20, 413)):
        body = json.dumps({**BASE, "max_tokens": 1}).encode()
        found, answer = tiny.post("/v1/completions", body + b" " * (size - len(body)))
        assert found == status
    assert answer["error"]["message"] == "the body has more than 1048576 bytes"


def test_a_body_in_pieces_is_limited_as_well(tiny: Served) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", tiny.port, SECONDS)) as line:
        parts = (b" " * (1 << 18) for _ in range(6))
        line.request("POST", "/v1/completions", parts, {"content-type": "application/json"})
        assert line.getresponse().status == 413


def test_a_body_that_does_not_come_is_given_up(texts: Texts) -> None:
    with counting(texts, Limits(max_body_seconds=0.05)) as server:
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
            line.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
                b"content-type: application/json\r\n\r\n{"
            )
            answer = line.recv(4096)
        assert b"408" in answer.partition(b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{")
        assert server.completion("fox")[0] == 200


@settings(max_examples=25)
@given(noise=st.binary(max_size=80))
def test_noise_on_the_line_does_not_stop_the_server(tiny: Served, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tiny.port), SECONDS) as line:
        line.sendall(noise + b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", tiny.port), SECONDS) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n" + noise)
    assert asked(tiny.port, "GET", "/v1/models")[0] == 200
    assert tiny.is_rid


def test_limits_of_tokens_are_told(texts: Texts) -> None:
    with counting(texts, Limits(max_prompt_tokens=3, max_new_tokens=5)) as server:
        status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": [1] * 4})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "the prompt has 4 tokens, and the longest one here 3" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", {**BASE, "prompt": [1], "max_tokens": 6})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert "6 new tokens are asked for, and the longest answer here has 5" in str(answer)
        status, answer = server.post(
            "/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 5}
        )
        assert answer["usage"]["completion_tokens"] == 5


def test_without_a_template_a_chat_is_refused(texts: Texts) -> None:
    with counting(texts, template=None) as server:
        status, answer = server.post("/v1/chat/completions", CHAT)
    assert status == 400
    assert "this model has no chat template; ask /v1/completions" in answer["error"]["message"]


def test_the_key_is_asked_for(texts: Texts) -> None:
    with counting(texts, key="secr\u00e9t") as server:
        for given in (None, "Bearer ", "Bearer secret", "Basic secr\u00e9t", "secr\u00e9t"):
            headers = {} if given is None else {"authorization": given.encode().decode("latin-1")}
            status, answer = server.post("/v1/completions", BASE, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert asked(server.port, "GET", "/v1/models", **headers)[0] == 401
        right = {"authorization": "Bearer secr\u00e9t".encode().decode("latin-1")}
        assert server.post("/v1/completions", BASE, **right)[0] == 200


def test_another_host_is_refused(texts: Texts) -> None:
    """A name that someone makes point to 127.0.0.1 is not this server's."""
    with counting(texts, hosts=frozenset({"localhost", "127.0.0.1", "::1"})) as server:
        for host, status in (
            ("evil.example", 403),
            ("evil.example:8000", 403),
            ("", 403),
            ("localhost:80", 200),
            ("LOCALHOST", 200),
            ("[::1]:8000", 200),
        ):
            assert asked(server.port, "GET", "/v1/models", host=host)[0] == status, host
