"""A server in this process, on a port of its own, and an engine whose answers are known."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from starlette.types import ASGIApp

from ascend_run.ops.generation.engine import Emitted, Finish, Request
from ascend_run.text.templates import ChatTemplate
from ascend_run.text.tokenizer import train_tokenizer
from ascend_run.tools.generate.session import Piece
from ascend_run.tools.generate.texts import Texts
from ascend_run.tools.serve.app import Service
from ascend_run.tools.serve.engine_thread import EngineThread
from ascend_run.tools.serve.limits import Limits
from ascend_run.tools.serve.served_model import ServedModel
from ascend_run.tools.serve.server import listening, server_of

LETTER_A = 65
"""Its id, and those of the other letters follow."""
CALL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %} of {{ m.name }} {{ m.tool_call_id }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""With tools."""
SECONDS = 30.0
"""Of every wait."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@contextlib.contextmanager
def served(app: ASGIApp, limits: Limits) -> Iterator[int]:
    """Serve an application; yields the port."""
    with contextlib.closing(listening("127.0.0.1", 0)) as listener:
        server = server_of(app, limits)
        server.config.timeout_graceful_shutdown = 1
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("it does not come")
        time.sleep(0.002)


class CountingSession:
    """Answers each prompt with the ids after its last one; a stub of a session."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.running: dict[int, tuple[Request, int]] = {}
        self.submitted: list[Request] = []
        self.stops: list[Sequence[str]] = []
        """Of each request; an answer ends before a token that is one of them."""
        self.cancelled: list[int] = []
        self.may_step = threading.Event()
        self.may_step.set()
        self.failure: Exception | None = None
        self.says: Sequence[int] = ()
        """Ids that it gives instead."""
        self.pause_after: int | None = None
        """Tokens of a sequence after which no more come."""

    @property
    def is_idle(self) -> bool:
        return not self.running

    def submit(self, request: Request, stop: Sequence[str] = ()) -> int:
        self.submitted.append(request)
        self.stops.append(stop)
        self.running[len(self.submitted)] = (request, 0)
        return len(self.submitted)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self.running.pop(number, None)

    def step(self) -> list[Piece]:
        if not self.may_step.wait(0.005):
            return []
        if self.failure is not None:
            raise self.failure
        numbers = [n for n, (_, count) in self.running.items() if count != self.pause_after]
        if not numbers:
            time.sleep(0.005)
        return [self._piece(number) for number in numbers]

    def _piece(self, number: int) -> Piece:
        request, count = self.running[number]
        self.running[number] = (request, count + 1)
        finish = None
        if count + 1 == request.max_new_tokens:
            finish = Finish.LENGTH
        token = self.says[count % len(self.says)] if self.says else counted(request, count)
        text = self.texts.token(token)
        if text in self.stops[number - 1]:
            text, finish = "", Finish.STOP
        if finish is not None:
            del self.running[number]
        logprob = None if request.sampling.logprobs is None else -0.5
        top = tuple((token + n, -0.5 - n) for n in range(request.sampling.logprobs or 0))
        emitted = Emitted(number, token, finish, logprob, top)
        return Piece(emitted=emitted, text=text, finish=finish)


def counted(request: Request, index: int) -> int:
    """Return the new token that the stub gives at a place."""
    return LETTER_A + (request.prompt[-1] + index) % 26


@attrs.frozen(kw_only=True, eq=False)
class Served:
    """A server with the stub behind it."""

    port: int
    session: CountingSession
    engine: EngineThread
    texts: Texts

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Post JSON, or bytes as they are; return the status and the JSON of the answer."""
        return post(self.port, path, body, **headers)

    def completion(self, prompt: str, **fields: Any) -> tuple[int, Any]:
        """Ask for a completion."""
        return self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields})

    @property
    def is_rid(self) -> bool:
        """Whether nothing of any request is left."""
        return not self.session.running and not self.engine.open and self.engine.is_idle


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Post JSON, or bytes as they are; return the status and the JSON of the answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asked(port, "POST", path, content, **{"content-type": "application/json", **headers})


def asked(
    port: int, method: str, path: str, content: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    """Send one request and return the status and the JSON of the answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as line:
        line.request(method, path, content, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())


def tiny_texts(folder: Path, *words: str) -> Texts:
    """Return a tokenizer of bytes and a few more."""
    tokenizer = train_tokenizer([" ".join(words) or "the quick brown fox"], 300)
    return Texts(tokenizer=tokenizer, end_ids=frozenset(), path=folder)


@contextlib.contextmanager
def counting(
    texts: Texts, limits: Limits | None = None, template: str | None = TEMPLATE, **of_service: Any
) -> Iterator[Served]:
    """Serve the stub."""
    session = CountingSession(texts)
    model = counting_model(texts, template)
    with EngineThread(session) as engine:
        limits = limits or Limits()
        service = Service(model=model, engine=engine, limits=limits, **of_service)
        with served(service.app(), limits) as port:
            yield Served(port=port, session=session, engine=engine, texts=texts)
            session.may_step.set()


def counting_model(texts: Texts, template: str | None = TEMPLATE) -> ServedModel:
    """Return what the server knows of the stub."""
    return ServedModel(
        name="tiny",
        created=1,
        texts=texts,
        template=None if template is None else chat_template(template),
        no_template="there is none",
        max_length=2048,
        vocab_size=texts.tokenizer.vocab_size,
    )


def chat_template(source: str) -> ChatTemplate:
    """Return a template that spells no special token."""
    return ChatTemplate(source=source, name="the tests' template", variables={}, date=None)
