"""Answers sent as they come, or whole; a client that vanishes or reads too slowly ends its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import attrs
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ascend_run.tools.generate.session import Piece

from .engine_thread import EngineFailed, EngineThread, Ticket
from .errors import ApiError
from .forms import Form
from .limits import Limits

T = TypeVar("T")
_LAST_WORDS_SECONDS = 1.0
"""For the error that ends a stream, which a reader may not take."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def json_response(content: object, status: int = 200, headers: Any = None) -> Response:
    """Return a response of JSON in ASCII, which has a form for each text."""
    body = json.dumps(content).encode("ascii")
    return Response(body, status, headers, "application/json")


def error_response(problem: ApiError) -> Response:
    """Return what a client gets of an error."""
    return json_response(problem.body(), problem.status, problem.headers)


@attrs.define(eq=False)
class Reply:
    """The answers to one request: an ASGI application for one call."""

    engine: EngineThread
    tickets: Sequence[Ticket]
    """Of each prompt."""
    form: Form
    stream: bool
    limits: Limits
    _has_begun: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; however it ends, the engine is rid of the request.

        Raises:
            ApiError: It took too long, or the engine failed, and nothing has been sent.
        """
        work = self._send_pieces(send) if self.stream else self._send_whole(scope, receive, send)
        try:
            async with asyncio.timeout(self.limits.max_seconds):
                too_slow = [ticket.too_slow.wait() for ticket in self.tickets]
                await unless(work, vanished(receive), *too_slow)
            return
        except TimeoutError:
            problem = ApiError(
                f"the answer took more than {self.limits.max_seconds:g} s; ask for fewer tokens",
                HTTPStatus.SERVICE_UNAVAILABLE,
                code="timeout",
            )
        except EngineFailed:
            problem = engine_failed()
        finally:
            for ticket in self.tickets:
                self.engine.close(ticket)
        if not self._has_begun:
            raise problem
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._send_event(send, json.dumps(problem.body()), more=False)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = await asyncio.gather(*map(_complete, self.tickets))
        self._has_begun = True
        await json_response(self.form.whole(answers))(scope, receive, send)

    async def _send_pieces(self, send: Send) -> None:
        turn = asyncio.Lock()  # of the answers, which share the line

        async def send_answer(index: int, ticket: Ticket) -> None:
            finish = None
            while finish is None:
                pieces = await ticket.pieces()
                finish = pieces[-1].finish
                async with turn:
                    if not self._has_begun:
                        await self._begin_stream(send)
                    await self._send_event(send, json.dumps(self.form.chunk(index, pieces)))

        await asyncio.gather(*(send_answer(*pair) for pair in enumerate(self.tickets)))
        for chunk in self.form.end():
            await self._send_event(send, json.dumps(chunk))
        await self._send_event(send, "[DONE]", more=False)

    async def _begin_stream(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        for chunk in self.form.begin():
            await self._send_event(send, json.dumps(chunk))

    async def _send_event(self, send: Send, data: str, more: bool = True) -> None:
        body = f"data: {data}\n\n".encode("ascii")
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _complete(ticket: Ticket) -> list[Piece]:
    """Wait for all pieces of an answer."""
    pieces: list[Piece] = []
    while not pieces or pieces[-1].finish is None:
        pieces += await ticket.pieces()
    return pieces


def engine_failed() -> ApiError:
    """Return the error of requests that the engine cannot answer any more."""
    return ApiError("the engine has failed", HTTPStatus.INTERNAL_SERVER_ERROR)


async def vanished(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless(work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, object]) -> T | None:
    """Return what the work returns, or None once one of the others ends; none of them is left."""
    tasks = [asyncio.ensure_future(one) for one in (work, *ends)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None  # type: ignore[return-value]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
