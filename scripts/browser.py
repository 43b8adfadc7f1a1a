"""Find a browser for the tests of HTML pages, or install Chromium if possible.

python scripts/browser.py    # called by ``make test``; never fails

Tests call ``find`` themselves, and show ``ADVICE`` if there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

PROGRAMS: Final[Mapping[str, Sequence[str]]] = {
    "chromium": (
        *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
        *("microsoft-edge", "microsoft-edge-stable", "msedge"),
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
        "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    ),
    "firefox": ("firefox", "firefox-esr", "/Applications/Firefox.app/Contents/MacOS/firefox"),
}
"""Engine -> its programs; the first one that starts is used."""
ADVICE: Final = "install Chromium (Debian: apt-get install chromium), Chrome, Edge or Firefox"
CHOICE: Final = "ASCEND_RUN_TEST_BROWSER"
"""Environment variable for the engine to use; default: chromium if installed, else firefox."""
PACKAGES: Final = {"chromium": "chromium", "firefox": "firefox-esr"}
"""Of Debian."""
START_SECONDS: Final = 60
INSTALL_SECONDS: Final = 600


class Found(NamedTuple):
    """A browser that starts."""

    engine: str
    """A key of ``PROGRAMS``."""
    program: str
    """Path."""


def find() -> Found | None:
    """Return the first browser, on ``PATH`` or in /Applications, that prints its version."""
    for engine in engines():
        for name in PROGRAMS[engine]:
            path = shutil.which(name)
            if path and not _failure([path, "--version"], START_SECONDS):
                return Found(engine, path)
    return None


def engines() -> Sequence[str]:
    """Return the engines to try, the preferred one first.

    Raises:
        ValueError: The environment variable names an unknown engine.
    """
    chosen = os.environ.get(CHOICE)
    if not chosen:
        return tuple(PROGRAMS)
    if chosen not in PROGRAMS:
        raise ValueError(f"{CHOICE}={chosen}: expected one of {', '.join(PROGRAMS)}")
    return (chosen,)


def install() -> str:
    """Install a browser with apt, as root; return why it failed, or an empty string.

    Outdated package lists may still work if they cannot be updated.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "not root, or no apt-get"
    package = PACKAGES[engines()[0]]
    _failure(["apt-get", "update", "-qq"], INSTALL_SECONDS)
    return _failure(["apt-get", "install", "-y", "-qq", package], INSTALL_SECONDS)


def _failure(command: Sequence[str], seconds: float) -> str:
    """Run a program; return why it failed, in one line, or an empty string."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)}: not done after {seconds:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{' '.join(command)}: exit code {done.returncode}: {last}"


def main() -> None:
    """Find or install a browser, and print the result in one line."""
    try:
        engines()
    except ValueError as problem:
        print(f"browser: {problem}", file=sys.stderr)
        sys.exit(2)
    found, why = find(), ""
    if found is None:
        why = install()
        found = find()
    if found is not None:
        print(f"browser: {found.program}")
    else:
        note = why or "what apt-get installed does not start"
        print(f"browser: none, so the tests that need one do not run; {ADVICE} ({note})")


if __name__ == "__main__":
    main()
