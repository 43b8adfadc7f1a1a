"""What a process looks like, so that two moments can be compared: attributes of other people's
modules, by identity, and settings that a process has one of."""

from __future__ import annotations

import atexit
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

_WATCHED: Final = ("torch", "megatron")
_LAZY: Final = ("torch.ops", "torch.classes")
"""Modules that grow by being used."""
_HELD: Final = (staticmethod, classmethod, property)
_ABSENT: Final = "absent"
_OF_COMPILE: Final = {"the threads", "what runs at exit (atexit)"}
"""What torch.compile keeps for the life of a process that has used it, beside a variable or two."""


def attributes() -> dict[str, object]:
    """Every function, class, method and module that a watched module holds, by dotted name."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        watched = name.partition(".")[0] in _WATCHED and not name.startswith(_LAZY)
        if not watched or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if not callable(value) and not isinstance(value, ModuleType):
                continue
            found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for method, held in list(vars(value).items()):
                    if callable(held) or isinstance(held, _HELD):
                        found[f"{name}.{attribute}.{method}"] = held
    return found


def replaced(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Names that hold another object, hold none any more, or hold one that others made.

    What a module holds because it was imported late is no change; nor is what torch replaces in
    itself at such an import.
    """
    grown = bool(_modules(after) - _modules(before))
    parents = {name.rpartition(".")[0] for name in before}
    changed = {
        name
        for name, value in before.items()
        if (held := after.get(name, _ABSENT)) is not value and (not grown or _is_foreign(held))
    }
    gained = {
        name
        for name in after.keys() - before.keys()
        if name.rpartition(".")[0] in parents and _is_foreign(after[name])
    }
    return changed | gained


def _modules(found: Mapping[str, object]) -> set[str]:
    return {value.__name__ for value in found.values() if isinstance(value, ModuleType)}


def made_in(place: str, found: Mapping[str, object]) -> set[str]:
    """Names that hold a function written in a file, or below a folder."""
    return {name for name, value in found.items() if _file_of(value).startswith(place)}


def _file_of(value: object) -> str:
    """Where a function was written; empty for anything else."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    return value.__code__.co_filename if isinstance(value, FunctionType) else ""


def _is_foreign(value: object) -> bool:
    """Whether a function was written outside of what is watched and of the standard library."""
    file = _file_of(value)
    homes = [
        str(getattr(sys.modules[top], "__path__", [_ABSENT])[0])
        for top in _WATCHED
        if top in sys.modules
    ]
    own = ("<", *homes, os.path.dirname(os.__file__))
    return bool(file) and not file.startswith(own)


def settings() -> dict[str, object]:
    """Name -> value of what a run must leave as it was; values compare."""
    mask = os.umask(0)
    os.umask(mask)
    state: dict[str, object] = {
        "the working directory": os.getcwd(),
        "the mask of file modes": mask,
        "sys.path": tuple(sys.path),
        "sys.meta_path": tuple(map(id, sys.meta_path)),
        "sys.excepthook": sys.excepthook,
        "sys.stdout": sys.stdout,
        "the recursion limit": sys.getrecursionlimit(),
        "warnings.filters": tuple(warnings.filters),
        "the root logger": (logging.root.level, tuple(map(id, logging.root.handlers))),
        "the threads": tuple(sorted(thread.name for thread in threading.enumerate())),
        "what runs at exit (atexit)": atexit._ncallbacks(),
        "random.random": random.random,
    }
    for number in signal.valid_signals():
        state[f"the handler of signal {number}"] = signal.getsignal(number)
    state |= {f"the environment variable {name}": value for name, value in os.environ.items()}
    state |= {name: read() for name, read in _torch_settings()}
    return state


def changed_settings(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """A phrase for each setting that differs."""
    compiling = "torch._inductor" in sys.modules
    for name in {**before, **after}:
        if compiling and (name in _OF_COMPILE or "TORCHINDUCTOR_" in name):
            continue
        was, now = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if was != now:
            plain = isinstance(was, str | int | float) and isinstance(now, str | int | float)
            yield f"{name} (was {was!r}, is {now!r})" if plain else name


def _torch_settings() -> Iterator[tuple[str, Callable[[], Any]]]:
    if "torch" not in sys.modules:
        return
    import torch
    import torch.utils.deterministic as fills
    from torch import overrides as _overrides
    from torch.utils import _python_dispatch as dispatch

    yield "torch's default dtype", lambda: str(torch.get_default_dtype())
    yield "torch's default device", lambda: str(torch.get_default_device())
    yield "torch's number of threads", torch.get_num_threads
    yield "torch.is_grad_enabled()", torch.is_grad_enabled
    yield "torch.is_anomaly_enabled()", torch.is_anomaly_enabled
    yield "torch's deterministic algorithms", torch.get_deterministic_debug_mode
    yield (
        "torch.utils.deterministic.fill_uninitialized_memory",
        lambda: vars(fills).get("fill_uninitialized_memory"),
    )
    yield "torch's float32 matmul precision", torch.get_float32_matmul_precision
    yield "torch.is_autocast_enabled('cpu')", lambda: torch.is_autocast_enabled("cpu")
    yield "torch.backends.cudnn.benchmark", lambda: torch.backends.cudnn.benchmark
    yield "torch.backends.cudnn.deterministic", lambda: torch.backends.cudnn.deterministic
    yield "torch.backends.mkldnn.enabled", lambda: torch.backends.mkldnn.enabled
    overrides: Any = _overrides
    yield "torch's function modes", lambda: len(overrides._get_current_function_mode_stack())
    yield "torch's dispatch modes", lambda: len(dispatch._get_current_dispatch_mode_stack())
    yield "torch.distributed.is_initialized()", torch.distributed.is_initialized
