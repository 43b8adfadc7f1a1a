"""A headless Firefox, driven by WebDriver BiDi; what that does not have, by the browser's own
scripts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .page import Page, View, address, ended_browser
from .web_socket import WebSocket

_EVENTS: Final = ("log.entryAdded", "network.beforeRequestSent")
_KEYS: Final = {"Home": "\ue011", "End": "\ue010", "ArrowRight": "\ue014"}
_SANDBOX: Final = "tests"
"""Where our scripts run when the page has none: its document is theirs, its globals are not."""
_WATCH: Final = """() => {
  window.stopped = [];
  addEventListener("securitypolicyviolation", event => stopped.push(event.blockedURI), true);
}"""
_FETCHED: Final = "[location.href, ...performance.getEntriesByType('resource').map(e => e.name)]"
"""BiDi tells of no file."""
_START_SECONDS: Final = 60


class Firefox:
    """One browser process; ``firefox()`` makes and ends it."""

    def __init__(self, connection: WebSocket) -> None:
        self._connection = connection
        self._next = 0
        self._events: list[dict[str, Any]] = []
        self.command("session.new", capabilities={})
        self.command("session.subscribe", events=_EVENTS)
        (window,) = self.command("browsingContext.getTree", **{"moz:scope": "chrome"})["contexts"]
        self._window = {"context": window["context"]}

    def open(self, place: Path | str, view: View) -> Page:
        """Open a file or an address in a tab of its own."""
        page = FirefoxPage(self, view.script)
        page.resize(view.width, view.height)
        tab = "gBrowser.selectedBrowser.browsingContext"
        settings = {"prefersColorSchemeOverride": view.scheme, "allowJavascript": view.script}
        self.evaluate(f"void Object.assign({tab}, {json.dumps(settings)})", self._window)
        self.command(
            "browsingContext.navigate",
            context=page.context,
            url=address(place),
            wait="complete",
        )
        if view.script:
            page.settle()
        return page

    def command(self, method: str, **parameters: Any) -> Any:
        """Send one command and wait for its answer."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.receive(30))
            if answer.get("id") == self._next:
                assert answer["type"] == "success", f"{method}: {answer}"
                return answer["result"]
            self._events.append(answer)

    def evaluate(self, expression: str, target: dict[str, str]) -> Any:
        """The value of a JavaScript expression, by way of JSON."""
        answer = self.command(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({expression})))()",
            target=target,
            awaitPromise=True,
        )
        assert answer["type"] == "success", answer["exceptionDetails"]
        text = answer["result"].get("value")
        return None if text is None else json.loads(text)

    def events(self, method: str, context: str) -> list[dict[str, Any]]:
        """What one page told of itself so far."""
        found = (e["params"] for e in self._events if e.get("method") == method)
        return [
            e for e in found if context in (e.get("context"), e.get("source", {}).get("context"))
        ]


class FirefoxPage(Page):
    """A tab, with everything that it did."""

    def __init__(self, browser: Firefox, script: bool) -> None:
        self._browser = browser
        self.context = browser.command("browsingContext.create", type="tab")["context"]
        self._watching = {"context": self.context, "sandbox": _SANDBOX}
        self._target = {"context": self.context} if script else self._watching
        browser.command(
            "script.addPreloadScript",
            functionDeclaration=_WATCH,
            contexts=[self.context],
            sandbox=_SANDBOX,
        )

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height}
        self._browser.command("browsingContext.setViewport", context=self.context, viewport=size)

    def evaluate(self, expression: str) -> Any:
        return self._browser.evaluate(expression, self._target)

    def mouse(self, kind: str, x: float, y: float) -> None:
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "x": round(x), "y": round(y)}]
        if kind != "move":
            button = {"press": "pointerDown", "release": "pointerUp"}[kind]
            actions.append({"type": button, "button": 0})
        self._perform("pointer", actions)

    def key(self, key: str) -> None:
        kinds = ("keyDown", "keyUp")
        self._perform("key", [{"type": kind, "value": _KEYS[key]} for kind in kinds])

    def _perform(self, device: str, actions: list[dict[str, Any]]) -> None:
        source = {"type": device, "id": device, "actions": actions}
        self._browser.command("input.performActions", context=self.context, actions=[source])

    def errors(self) -> list[Any]:
        self.evaluate("null")  # whatever was said before its answer is here then
        logged = self._browser.events("log.entryAdded", self.context)
        return [entry for entry in logged if entry["level"] in ("error", "warn")]

    def requests(self) -> list[str]:
        fetched: list[str] = self.evaluate(_FETCHED)
        sent = self._browser.events("network.beforeRequestSent", self.context)
        found = dict.fromkeys([*fetched, *(event["request"]["url"] for event in sent)])
        # Data are the address itself; Firefox loads a font of its own so, once.
        return [address for address in found if not address.startswith("data:")]

    def refused(self) -> list[str]:
        stopped = self._browser.evaluate("window.stopped", self._watching)
        return ["csp" for address in stopped if address != "inline"]


@contextlib.contextmanager
def firefox(program: str) -> Iterator[Firefox]:
    """A browser for the length of the block."""
    flags = ("--headless", "--no-remote", "--remote-debugging-port", "0")
    # So that its own scripts may be run, which set what the protocol has no command for.
    command = [program, *flags, "--remote-allow-system-access", "--profile", "{profile}"]
    with ended_browser(command) as profile:
        connection = WebSocket.connect(*_address(profile), "/session")
        try:
            yield Firefox(connection)
        finally:
            connection.close()


def _address(profile: Path) -> tuple[str, int]:
    """Where it listens, once it does."""
    file = profile / "WebDriverBiDiServer.json"
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            told = json.loads(file.read_text())
            return told["ws_host"], told["ws_port"]
        time.sleep(0.05)
    raise TimeoutError("Firefox opens no port for WebDriver BiDi")
