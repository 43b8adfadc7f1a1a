"""Distributions of a test's own on ``sys.path``, and their modules forgotten afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_distributions import make_distribution


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``make_distribution`` in a folder of its own that imports find until the test ends."""
    before = set(sys.modules)

    def put_on_path(name: str, *args: object, **kwargs: object) -> Path:
        count = len(list(tmp_path.iterdir()))
        folder = make_distribution(tmp_path / f"site-{count}", name, *args, **kwargs)  # type: ignore[arg-type]
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield put_on_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
