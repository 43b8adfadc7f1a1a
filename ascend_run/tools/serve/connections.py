"""Connections: how many are open, and how long one may be silent."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError
from .limits import Limits
from .replying import error_response

_MOST_ANSWERED = 2
"""Of up to so many times the limit, each extra one is answered with 503; others are closed."""


class Connection(H11Protocol):
    """A connection with limits; uvicorn's own waits for a request's head, or for the rest of a
    body that is not read, as long as the client likes."""

    def __init__(self, limits: Limits, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        number, most = len(self.connections), self._limits.max_connections
        if number > _MOST_ANSWERED * most:
            transport.abort()
        elif number > most:
            self.app = _too_many
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin the client's time when nothing is to be answered; end it when something is."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None:
            seconds = self._limits.max_head_seconds
            self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(
        ApiError(
            "too many connections are open; ask again later",
            HTTPStatus.SERVICE_UNAVAILABLE,
            code="overloaded",
            retry=True,
        )
    )
    response.headers["connection"] = "close"
    await response(scope, receive, send)
