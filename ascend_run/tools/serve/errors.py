"""Errors in the form of OpenAI's API. Imports no torch."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: Of HTTP.
        param: Field of the body that is wrong.
        code: In OpenAI's words where it has one.
        retry: Whether the same request may be answered later; clients of OpenAI's API ask again
            by themselves then.
    """

    def __init__(
        self,
        message: str,
        status: int = HTTPStatus.BAD_REQUEST,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry = retry

    @property
    def headers(self) -> dict[str, str]:
        if self.retry:
            return {"retry-after": "1"}
        return {"x-should-retry": "false"} if self.status >= 500 else {}

    def body(self) -> dict[str, Any]:
        """Return what a client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        named = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": named}
