"""Isolates a test session from earlier sessions and from the machine: empty caches of its own, and
property tests without a time limit for each example; and Ctrl-C works for what tests start, also in
a session that a shell has started in the background, where it is ignored.

For example, torch's compiler does less work if it finds a graph on disk.

Garbage collections search what tests have made, not the modules and tests of the whole session.

A test's changes of environment variables are undone. Commands that run in this process set some for
libraries that they import; ranks started with others need new servers, whose imports take seconds
(``testing.rank_processes``).
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

OWN: Final = {
    "HOME": "home",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis",
}
"""Variable -> the session's folder. By default the last two caches are not in ``HOME``: one is
shared by all processes of a user, the other is in the working directory."""
SHARED: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Of all workers of xdist: inductor's headers and its probes of the processor take ten seconds."""
CLEARED: Final = (
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "PYTORCH_KERNEL_CACHE_PATH"),
    *("TRITON_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"),
)
"""Variables that override ``HOME``; without them these caches are there."""
CHOSEN: Final = {
    "ASCEND_RUN_BF16_MATMUL_DTYPE": "bf16",
    "ASCEND_RUN_FP32_MATMUL_LIBRARY": "torch",
}
"""Variable -> value of what a run would measure: results must not depend on the processor."""


def pytest_configure(config: pytest.Config) -> None:
    """Set up before collection; under xdist each worker has its own caches, but for ``SHARED``,
    which is that of the session that has started it."""
    folder = tempfile.TemporaryDirectory(prefix="ascend-run-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    for name in CLEARED:
        patch.delenv(name, raising=False)
    for name, value in CHOSEN.items():
        patch.setenv(name, value)
    for name, place in OWN.items():
        own = Path(folder.name) / place
        own.mkdir()
        if name != SHARED or not hasattr(config, "workerinput"):
            patch.setenv(name, str(own))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which children would inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
        config.add_cleanup(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    settings.register_profile("untimed", deadline=None)  # the rest is hypothesis's default
    settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections, a quarter of its time; one of what is there then
    takes half a second, in each test that asks for it, so it is not searched again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Undo what a test changes in the environment, and its fixtures."""
    with _environment_kept():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object],
) -> Generator[None, object, object]:
    """Undo at once what fixtures change that tests share, such as by running a command."""
    with nullcontext() if fixturedef.scope == "function" else _environment_kept():
        return (yield)


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        if os.environ != before:
            os.environ.clear()
            os.environ.update(before)
