"""Which lines of a package run in a pytest session: ``pytest -p tests.support.reach``.

``ASCEND_RUN_REACH`` names the package's folder and the file to write to, joined by ``:``. Only what
stands inside functions counts; the rest runs when a module is imported. Tests only: it slows every
call down.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

VARIABLE = "ASCEND_RUN_REACH"


class Reach:
    """Traces the functions of one folder's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}{os.sep}"
        self.lines: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._folder) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def lines_of_functions(path: Path) -> set[int]:
    """Lines that a call may run."""
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    return {line for function in _functions(code) for line in _lines(function)}


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            yield from _functions(constant)


def _lines(function: CodeType) -> Iterator[int]:
    yield from (n for _, _, n in function.co_lines() if n and n > function.co_firstlineno)


def _traced() -> tuple[Path, Path]:
    folder, _, target = os.environ[VARIABLE].partition(":")
    return Path(folder), Path(target)


_REACH: dict[str, Reach] = {}


def pytest_configure(config: pytest.Config) -> None:
    _REACH["reach"] = reach = Reach(_traced()[0])
    sys.settrace(reach)
    threading.settrace(reach)


def pytest_sessionfinish(session: pytest.Session) -> None:
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    _traced()[1].write_text(json.dumps(sorted(_REACH["reach"].lines)), encoding="utf-8")
