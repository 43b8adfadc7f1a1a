"""Frames of messages: as RFC 6455 has them on the wire, whatever their length."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from .web_socket import WebSocket


@pytest.fixture
def ends() -> Iterator[tuple[WebSocket, socket.socket]]:
    """A client, and the wire's other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield WebSocket(ours), theirs


def frame(payload: bytes, first: int) -> bytes:
    """What a server sends: no mask."""
    length = len(payload)
    if length < 126:
        return struct.pack(">BB", first, length) + payload
    if length < 1 << 16:
        return struct.pack(">BBH", first, 126, length) + payload
    return struct.pack(">BBQ", first, 127, length) + payload


@pytest.mark.parametrize(
    ("length", "head"),
    [(125, "81 fd"), (126, "81 fe 007e"), (65535, "81 fe ffff"), (65536, "81 ff 0000000000010000")],
)
def test_a_message_is_sent_masked_behind_its_length(
    ends: tuple[WebSocket, socket.socket], length: int, head: str
) -> None:
    client, wire = ends
    text = ("abcde" * length)[:length]
    client.send(text)
    start = bytes.fromhex(head)
    sent = wire.recv(len(start) + 4 + length, socket.MSG_WAITALL)
    key, masked = sent[len(start) :][:4], sent[len(start) + 4 :]
    assert sent.startswith(start)
    assert bytes(byte ^ key[i % 4] for i, byte in enumerate(masked)).decode() == text


@pytest.mark.parametrize("length", [0, 125, 126, 65535, 65536])
def test_a_message_is_received_whole(ends: tuple[WebSocket, socket.socket], length: int) -> None:
    client, wire = ends
    text = ("abcde" * length)[:length]
    wire.sendall(frame(text.encode(), 0x81) + frame(b"next", 0x81))
    assert client.receive(5) == text
    assert client.receive(5) == "next"


def test_a_message_in_parts_is_one(ends: tuple[WebSocket, socket.socket]) -> None:
    client, wire = ends
    wire.sendall(frame(b"in ", 0x01) + frame(b"three ", 0x00) + frame(b"parts", 0x80))
    assert client.receive(5) == "in three parts"


def test_a_browser_that_says_nothing_or_ends_is_named(
    ends: tuple[WebSocket, socket.socket],
) -> None:
    client, wire = ends
    with pytest.raises(AssertionError, match="does not answer"):
        client.receive(0)
    wire.close()
    with pytest.raises(AssertionError, match="the browser ended"):
        client.receive(5)
