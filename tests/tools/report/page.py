"""What a test does with a page in a browser, whichever it is; nothing to install beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class View:
    """How a page is looked at."""

    width: int = 1280
    """Unit: CSS pixels, and below."""
    height: int = 900
    scheme: str = "light"
    """``light`` or ``dark``: what the reader prefers."""
    script: bool = True
    """Whether the page's scripts may run."""


class Page(ABC):
    """One file opened in a tab of its own, with everything that it did."""

    @abstractmethod
    def resize(self, width: int, height: int) -> None:
        """Give the page another size. Unit: CSS pixels."""

    def settle(self) -> None:
        """Wait until what was asked for is painted."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 20)))")

    @abstractmethod
    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""

    @abstractmethod
    def mouse(self, kind: str, x: float, y: float) -> None:
        """``move`` the pointer to a point in view, or ``press`` or ``release`` its button there."""

    @abstractmethod
    def key(self, key: str) -> None:
        """Press and release a key, by its name in the DOM."""

    @abstractmethod
    def errors(self) -> list[Any]:
        """Exceptions, console errors, and refusals of the content policy."""

    @abstractmethod
    def requests(self) -> list[str]:
        """Everything that was fetched, the page itself first."""

    @abstractmethod
    def refused(self) -> list[str]:
        """Why each request that was not let through was stopped."""


class Browser(Protocol):
    """A running browser."""

    def open(self, place: Path | str, view: View) -> Page:
        """Open a file or an address in a tab of its own."""


def address(place: Path | str) -> str:
    """Return the address of a file, or the one given."""
    return place if isinstance(place, str) else place.resolve().as_uri()


@contextlib.contextmanager
def ended_browser(command: Sequence[str], pass_fds: Sequence[int] = ()) -> Iterator[Path]:
    """A browser's process for the length of the block, and the folder of its profile.

    Args:
        command: With ``{profile}`` where the folder is named.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [word.replace("{profile}", profile) for word in command],
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Path(profile)
        finally:
            # Nothing of it is kept, and one that is asked to close may take half a minute.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
