"""curl, against an engine whose answers are known."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ascend_run.tools.generate.texts import Texts

from .serving import SECONDS, Served, counting
from .test_with_openai import expected


def curl(server: Served, path: str, *words: str) -> tuple[int, str]:
    """Return the status and the body of an answer."""
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", str(SECONDS)]
    url = f"http://127.0.0.1:{server.port}{path}"
    done = subprocess.run(
        [*command, "--write-out", "\n%{http_code}", *words, url],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=True,
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def posted(server: Served, path: str, body: Any, *words: str) -> tuple[int, str]:
    """Post JSON."""
    return curl(
        server, path, "--header", "content-type: application/json", *words, "--data", _text(body)
    )


def _text(body: Any) -> str:
    return body if isinstance(body, str) else json.dumps(body)


def events(body: str) -> list[str]:
    """Return what follows ``data:`` in each event."""
    parts = body.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def test_models_are_listed(tiny: Served) -> None:
    status, body = curl(tiny, "/v1/models")
    assert status == 200
    assert [one["id"] for one in json.loads(body)["data"]] == ["tiny"]


def test_a_completion_is_whole_or_a_stream(tiny: Served) -> None:
    asked = {"model": "tiny", "prompt": "fox", "max_tokens": 12}
    status, body = posted(tiny, "/v1/completions", asked)
    assert status == 200
    letters = expected(tiny, "fox", 12)
    assert json.loads(body)["choices"][0]["text"] == letters
    _, body = posted(tiny, "/v1/completions", {**asked, "stop": letters[4]})
    assert json.loads(body)["choices"][0]["text"] == letters[:4]
    status, body = posted(tiny, "/v1/completions", {**asked, "stream": True}, "--no-buffer")
    *chunks, last = events(body)
    assert (status, last) == (200, "[DONE]")
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == expected(tiny, "fox", 12)


def test_a_chat_is_a_stream_of_deltas(tiny: Served) -> None:
    message = {"role": "user", "content": "fox"}
    asked = {"model": "tiny", "messages": [message], "max_tokens": 4, "stream": True}
    status, body = posted(tiny, "/v1/chat/completions", asked)
    *chunks, last = map(json.loads, events(body)[:-1])
    assert status == 200
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", '{"model": ', 400, "JSON"),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404, "this server has 'tiny'"),
        ("/v1/nothing", {}, 404, "/v1/nothing"),
    ],
    ids=["json", "option", "model", "path"],
)
def test_errors_have_a_status_and_a_message(
    tiny: Served, path: str, body: Any, status: int, says: str
) -> None:
    found, text = posted(tiny, path, body)
    assert found == status
    assert says in json.loads(text)["error"]["message"]


def test_a_large_body_and_a_wrong_key_are_refused(texts: Texts, tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_text(json.dumps({"model": "tiny", "prompt": "a" * (1 << 21)}))
    with counting(texts, key="right") as server:
        assert curl(server, "/v1/models")[0] == 401
        bearer = ("--header", "authorization: Bearer right")
        assert curl(server, "/v1/models", *bearer)[0] == 200
        assert posted(server, "/v1/completions", f"@{large}", *bearer)[0] == 413
        assert server.is_rid
