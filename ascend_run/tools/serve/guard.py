"""Who may ask: the key, and the name by which the server is called."""

from __future__ import annotations

import hmac
from http import HTTPStatus

import attrs
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .replying import error_response

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@attrs.frozen(eq=False)
class Guard:
    """Refuses requests before anything of them is read."""

    app: ASGIApp
    key: str | None
    """What requests of the API must bring; None: nothing."""
    hosts: frozenset[str] | None
    """Names in the header ``Host``: a page of another site, whose name is made to point to this
    machine, is refused. None: any."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        await (self.app if problem is None else error_response(problem))(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = _without_port(headers.get("host", ""))
        if self.hosts is not None and host not in self.hosts:
            return ApiError(
                f"the host {host!r} is not served; ask 127.0.0.1 or localhost", HTTPStatus.FORBIDDEN
            )
        if self.key is None or not scope["path"].startswith("/v1/"):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1"), self.key.encode()
        ):
            return None
        return ApiError(
            "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
            HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
