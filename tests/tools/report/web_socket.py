"""The client's end of a WebSocket (RFC 6455), as far as a browser's text messages need it."""

from __future__ import annotations

import base64
import os
import select
import socket
import struct
from typing import Final

_TEXT, _FINAL, _MASKED = 0x1, 0x80, 0x80
_CHUNK: Final = 1 << 16


class WebSocket:
    """Text messages over an open connection; a message that comes in parts is one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    @classmethod
    def connect(cls, host: str, port: int, path: str) -> WebSocket:
        """Open one, with the handshake of HTTP."""
        opened = cls(socket.create_connection((host, port), timeout=30))
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        opened._connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        while b"\r\n\r\n" not in opened._buffer:
            opened._read(30)
        head, _, opened._buffer = opened._buffer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"101", head
        return opened

    def close(self) -> None:
        self._connection.close()

    def send(self, text: str) -> None:
        """Send one message; what a client sends is masked, and Firefox refuses a key of zeros."""
        payload, key = text.encode(), os.urandom(4)
        length = len(payload)
        if length < 126:
            head = struct.pack(">BB", _FINAL | _TEXT, _MASKED | length)
        elif length < 1 << 16:
            head = struct.pack(">BBH", _FINAL | _TEXT, _MASKED | 126, length)
        else:
            head = struct.pack(">BBQ", _FINAL | _TEXT, _MASKED | 127, length)
        masked = bytes(byte ^ key[i % 4] for i, byte in enumerate(payload))
        self._connection.sendall(head + key + masked)

    def receive(self, seconds: float) -> str:
        """The next message, waiting at most so long for each part of it."""
        message = b""
        while True:
            first, second = self._take(2, seconds)
            length = second & 0x7F
            if length >= 126:
                width = {126: 2, 127: 8}[length]
                length = int.from_bytes(self._take(width, seconds), "big")
            message += self._take(length, seconds)
            if first & _FINAL:
                return message.decode()

    def _take(self, count: int, seconds: float) -> bytes:
        while len(self._buffer) < count:
            self._read(seconds)
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._connection], [], [], max(0.0, seconds))
        assert ready, "the browser does not answer"
        data = self._connection.recv(_CHUNK)
        assert data, "the browser ended"
        self._buffer += data
