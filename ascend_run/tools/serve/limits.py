"""What the server accepts at most. Imports no torch."""

from __future__ import annotations

import attrs

_MOST_OTHERS = 128
"""Connections beside those of requests that wait or run: idle ones, and ones to be refused."""


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of requests."""

    max_prompt_tokens: int | None = None
    """None: as far as the model's positions and the cache reach."""
    max_new_tokens: int | None = None
    """Longest answer that a request may ask for; None likewise."""
    max_body_bytes: int = 1 << 20
    """Checked before the body is parsed."""
    max_open: int = 272
    """Requests that wait or run."""
    max_head_seconds: float = 10.0
    """From the connection, or the answer before, to the end of a request's head. Unit: seconds."""
    max_seconds: float = 600.0
    """From the complete body to the last token. Unit: seconds."""
    max_body_seconds: float = 30.0
    """Until the body is complete. Unit: seconds."""
    max_unread: int = 256
    """Pieces of a stream that wait for its reader; with one more it is ended."""

    @property
    def max_connections(self) -> int:
        """With one more, its request is refused."""
        return self.max_open + _MOST_OTHERS
