"""A headless Chromium, Chrome or Edge, driven over its DevTools pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .page import Page, View, address, ended_browser

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_ABOVE_STANDARD = 10


class Chromium:
    """One browser process; ``chromium()`` makes and ends it."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self._next = 0
        self._events: list[dict[str, Any]] = []

    def open(self, place: Path | str, view: View) -> Page:
        """Open a file or an address in a tab of its own."""
        page = ChromiumPage(self)
        page.resize(view.width, view.height)
        feature = {"name": "prefers-color-scheme", "value": view.scheme}
        page.command("Emulation.setEmulatedMedia", features=[feature])
        page.command("Emulation.setScriptExecutionDisabled", value=not view.script)
        page.command("Page.navigate", url=address(place))
        self.wait_for(page.session, "Page.loadEventFired")
        if view.script:
            page.settle()
        return page

    def command(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send one DevTools command and wait for its answer."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(time.monotonic() + 30)
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What one page told of itself so far."""
        self.command("Browser.getVersion")  # whatever was said before its answer is here then
        return [event for event in self._events if event.get("sessionId") == session]

    def wait_for(self, session: str, method: str) -> None:
        """Wait until a page tells of an event."""
        deadline = time.monotonic() + 30
        while not any(
            e.get("sessionId") == session and e.get("method") == method for e in self._events
        ):
            self._events.append(self._receive(deadline))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], left)
            assert ready, "the browser does not answer"
            data = os.read(self._reader, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class ChromiumPage(Page):
    """A tab, with everything that it did."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._pressed = False
        target = browser.command("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.command("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        return self._browser.command(method, self.session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression: str) -> Any:
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        self._pressed = (self._pressed or kind == "press") and kind != "release"
        self.command(
            "Input.dispatchMouseEvent",
            type={"move": "mouseMoved", "press": "mousePressed", "release": "mouseReleased"}[kind],
            x=x,
            y=y,
            button="none" if kind == "move" and not self._pressed else "left",
            buttons=int(self._pressed),
            clickCount=int(kind != "move"),
        )

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def errors(self) -> list[Any]:
        found = []
        for event in self._browser.events(self.session):
            method, told = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(told["exceptionDetails"])
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
                found.append(told["args"])
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"])
        return found

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events(self.session)
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def refused(self) -> list[str]:
        return [
            event["params"].get("blockedReason", "")
            for event in self._browser.events(self.session)
            if event.get("method") == "Network.loadingFailed"
        ]

    def screenshot(self, **clip: float) -> bytes:
        """PNG of what is in view, or of ``x, y, width, height``."""
        more = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        return base64.b64decode(
            self.command("Page.captureScreenshot", format="png", **more)["data"]
        )


@contextlib.contextmanager
def chromium(program: str) -> Iterator[Chromium]:
    """A browser for the length of the block."""
    its_reader, our_writer = _pipe()
    our_reader, its_writer = _pipe()
    shell = ["bash", "-c", f'exec "$@" 3<&{its_reader} 4>&{its_writer}', "bash"]
    command = [*shell, program, *_FLAGS, "--user-data-dir={profile}"]
    with ended_browser(command, pass_fds=(its_reader, its_writer)):
        os.close(its_reader)
        os.close(its_writer)
        try:
            yield Chromium(our_reader, our_writer)
        finally:
            os.close(our_reader)
            os.close(our_writer)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 and 4, the numbers under which the browser looks for its own."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD, _ABOVE_STANDARD) for end in ends)
    for end in ends:
        os.close(end)
    return moved
