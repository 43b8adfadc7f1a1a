"""What a user types, from a terminal or a pipe. Imports no torch."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

_PROMPT, _MORE = "> ", "... "
Read = Callable[[str], str | None]
"""Takes a prompt to show; returns a line without its end, or None after the last one."""


def entries(read: Read) -> Iterator[str]:
    """Yield entries: lines, joined to the next one where they end with a backslash."""
    while (line := read(_PROMPT)) is not None:
        while line.endswith("\\") and (more := read(_MORE)) is not None:
            line = f"{line[:-1]}\n{more}"
        yield line


def reader() -> Read:
    """Return what reads the standard input: with a prompt and with editing from a terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # an entry that is no text is refused
    if not sys.stdin.isatty():
        return _piped
    with suppress(ImportError):
        import readline  # noqa: F401 (``input`` edits with it)
    return _typed


def _piped(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt if sys.stdout.isatty() else "")
    except EOFError:
        click.echo(err=True)
        return None


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C is noted and no more; a second one raises KeyboardInterrupt.

    Yields:
        Whether it has come.
    """
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: has_come
    finally:
        signal.signal(signal.SIGINT, before)
