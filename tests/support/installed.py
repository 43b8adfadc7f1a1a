"""A fixture that puts a test's distributions on ``sys.path``; import it in a conftest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .fake_distributions import make_distribution, plugin_source

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Run ``make_distribution`` in a folder of its own that is importable until the test ends."""
    before = set(sys.modules)

    def put_on_path(name: str, *args: Any, **kwargs: Any) -> Path:
        count = len(list(tmp_path.glob("site-*")))
        folder = make_distribution(tmp_path / f"site-{count}", name, *args, **kwargs)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield put_on_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def offer_declared(install: Install, name: str, declared: str, source: str | None = None) -> Path:
    """Install ``ascend-run-NAME`` with one plugin that has a static manifest.

    Args:
        declared: The fields of the static manifest, as TOML.
        source: Source of its package, without which it does nothing.
    """
    package = f"fake_{name.replace('-', '_')}"
    points = {
        "ascend_run.plugins": {name: f"{package}:Plugin"},
        "ascend_run.manifests": {name: f"{package}:manifest.toml"},
    }
    files = {
        f"{package}/__init__.py": plugin_source(name) if source is None else source,
        f"{package}/manifest.toml": f"[{name}]\n{declared}\n",
    }
    return install(f"ascend-run-{name}", points, files)


def offer(
    install: Install, name: str, source: str | None = None, group: str = "plugins", **kwargs: Any
) -> Path:
    """Install ``ascend-run-NAME`` with one plugin; without a source, one that does nothing."""
    module = f"fake_{name.replace('-', '_')}"
    points = {f"ascend_run.{group}": {name: f"{module}:Plugin"}}
    files = {f"{module}.py": plugin_source(name) if source is None else source}
    return install(f"ascend-run-{name}", points, files, **kwargs)
