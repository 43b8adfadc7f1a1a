"""What of a file or of its JSON is no Unicode text. No torch."""

from __future__ import annotations

import json
from typing import Any


def wrong_byte(line: str) -> str | None:
    """Return where a line, decoded with ``surrogateescape``, is not UTF-8; None if it is."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) & 0xFF
        return f"not UTF-8: byte 0x{byte:02x} at column {error.start + 1}"
    return None


def lone_surrogate(source: str, value: Any) -> str | None:
    """Return which escape of parsed JSON is half a character, as a message; None if none is.

    Args:
        source: The JSON text of the value.
    """
    if "\\ud" not in source and "\\uD" not in source:
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        return (
            f"has \\u{half:04x} without the other half of its surrogate pair, which is no "
            "character; write the character itself, or both halves"
        )
    return None
