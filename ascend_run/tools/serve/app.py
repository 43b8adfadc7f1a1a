"""The routes of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .asked import Asked, asked_chat, asked_completion
from .engine_thread import EngineFailed, EngineThread
from .errors import ApiError
from .fields import parsed
from .forms import ChatForm, CompletionForm, Form
from .guard import Guard
from .limits import Limits
from .messages import names_of
from .page import page_response
from .replying import Reply, engine_failed, error_response, json_response
from .served_model import ServedModel

_MOST_DROPPED = 16
"""A body of up to so many times its limit is read and dropped, so that the refusal is heard."""


@attrs.frozen(kw_only=True, eq=False)
class Service:
    """A model, its engine, and the limits of requests."""

    model: ServedModel
    engine: EngineThread
    limits: Limits = attrs.field(factory=Limits)
    key: str | None = None
    hosts: frozenset[str] | None = None
    """Names by which the server may be called; None: any."""

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            middleware=[Middleware(cast(Any, Guard), key=self.key, hosts=self.hosts)],
            exception_handlers={
                ApiError: lambda request, problem: error_response(cast(ApiError, problem)),
                HTTPException: _of_http,
                Exception: lambda request, problem: error_response(
                    ApiError("the server failed", HTTPStatus.INTERNAL_SERVER_ERROR)
                ),
            },
        )

    async def _page(self, request: Request) -> Response:
        chats, asks_key = self.model.template is not None, self.key is not None
        return page_response(self.model.name, chats=chats, asks_key=asks_key)

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.model.name:
            raise self.model.another(name)
        return json_response(self._card())

    async def _completion(self, request: Request) -> Response:
        return await self._reply(request, asked_completion, CompletionForm)

    async def _chat(self, request: Request) -> Response:
        return await self._reply(request, asked_chat, ChatForm)

    async def _reply(
        self, http: Request, read: Callable[[Mapping[str, Any]], Asked], form: type[Form]
    ) -> Response:
        """
        Raises:
            ApiError: The request cannot be answered.
        """
        asked = read(parsed(await body_of(http, self.limits)))
        number = len(asked.prompts) or 1
        self._require_room(number)  # before the prompts are encoded, which is work
        # In another thread, since a long prompt takes a while to encode.
        requests = await asyncio.to_thread(self.model.requests, asked, self.limits)
        self._require_room(number)  # which others may have taken meanwhile
        most_unread = self.limits.max_unread if asked.stream else None
        try:
            tickets = [self.engine.submit(one, asked.stop, most_unread) for one in requests]
        except EngineFailed:
            raise engine_failed() from None
        answer = form(
            model=self.model.name,
            texts=self.model.texts,
            num_prompt=sum(len(one.prompt) for one in requests),
            include_usage=asked.include_usage,
            tools=names_of(asked.tools),
        )
        reply = Reply(self.engine, tickets, answer, asked.stream, self.limits)
        return cast(Response, reply)  # of which starlette needs the call alone

    def _require_room(self, number: int) -> None:
        """
        Raises:
            ApiError: So many prompts cannot be taken, now or ever.
        """
        most, num_open = self.limits.max_open, len(self.engine.open)
        if number > most:
            raise ApiError(
                f"{number} prompts in one request, and at most {most} are taken; send several "
                "requests",
                param="prompt",
            )
        if num_open + number > most:
            raise ApiError(
                f"{num_open} requests wait or run, and no more are taken; ask again later",
                HTTPStatus.SERVICE_UNAVAILABLE,
                code="overloaded",
                retry=True,
            )

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "ascend-run",
        }


async def body_of(http: Request, limits: Limits) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: It is not JSON by its header, too large, too slow, or incomplete.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site may send other types unasked
        raise ApiError(
            f"content-type {kind!r}: expected application/json",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    limit, total, content = limits.max_body_bytes, 0, bytearray()
    try:
        async with asyncio.timeout(limits.max_body_seconds):
            async for part in http.stream():
                total += len(part)
                if total <= limit:
                    content += part
                elif total > _MOST_DROPPED * limit:
                    break
    except TimeoutError:
        raise ApiError(
            f"the body was not complete after {limits.max_body_seconds:g} s",
            HTTPStatus.REQUEST_TIMEOUT,
        ) from None
    except ClientDisconnect:
        raise ApiError("the body is not complete") from None
    if total > limit:
        raise ApiError(f"the body has more than {limit} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return bytes(content)


def _of_http(request: Request, problem: Exception) -> Response:
    """An error of starlette: no such path, or another method."""
    assert isinstance(problem, HTTPException)
    status = HTTPStatus(problem.status_code)
    text = f"{request.method} {request.url.path}: {status.phrase.lower()}"
    response = error_response(ApiError(text, status))
    response.headers.update(problem.headers or {})
    return response
