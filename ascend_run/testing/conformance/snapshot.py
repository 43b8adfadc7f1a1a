"""Snapshots of a process to compare: attributes of other packages' modules, and process-wide
settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, Final

import attrs

from .import_probe import process_state

_HOMES: Final = ("torch", "megatron", "numpy")
_WATCHED: Final = frozenset({*_HOMES, "ascend_run"})
_ALSO: Final = ("builtins", "json", "logging", "os", "pickle", "random", "signal", "time")
"""Modules of the standard library that are compared too."""
PROCESS_GROUPS: Final = "the process groups"
_NOT: Final = ("torch.ops", "torch.classes", "ascend_run.plugins")
"""Modules whose attributes are created by use, and those of plugins."""
_COMPILER: Final = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses")
"""Modules in which torch counts what it has compiled."""
_PLAIN: Final = (bool, int, float, str, NoneType)
_HELD: Final = (staticmethod, classmethod, property)
_ABSENT: Final = "absent"
_COMPILED: Final = "frames that torch.compile has seen"
_PARAMETERS: Final = "the number of parameters in memory"
_OF_COMPILE: Final = {
    *("the threads", "what runs at exit (atexit)", f"the open file {os.devnull}"),
    _PARAMETERS,
}
"""Settings that torch.compile changes permanently in a process, besides some variables."""
_VARIABLES_OF_COMPILE: Final = ("TORCHINDUCTOR_", "TRITON_")
"""The latter where it compiles for a GPU."""


@attrs.frozen
class Attributes:
    """Attributes of modules and of the classes that they define, by dotted name.

    All attributes are copied, which is cheap; those that matter are selected when comparing.
    """

    modules: Mapping[str, Mapping[str, object]]
    classes: Mapping[str, Mapping[str, object]]

    def holders(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        yield from self.modules.items()
        yield from self.classes.items()

    def modules_held(self) -> set[str]:
        """Names of the modules that are attributes of these modules."""
        values = (value for held in self.modules.values() for value in held.values())
        return {value.__name__ for value in values if isinstance(value, ModuleType)}


def _is_public(name: str, value: object) -> bool:
    """A function, a class, a module or a public constant."""
    constant = isinstance(value, _PLAIN) and not name.startswith("_")
    return constant or callable(value) or isinstance(value, ModuleType)


def _is_method(name: str, value: object) -> bool:
    return callable(value) or isinstance(value, _HELD)


def attributes() -> Attributes:
    """Take a snapshot of the attributes."""
    modules: dict[str, Mapping[str, object]] = {}
    classes: dict[str, Mapping[str, object]] = {}
    for name, module in list(sys.modules.items()):
        watched = name.partition(".")[0] in _WATCHED or name in _ALSO
        if not watched or name.startswith(_NOT) or not isinstance(module, ModuleType):
            continue
        modules[name] = vars(module).copy()
        for attribute, value in modules[name].items():
            if isinstance(value, type) and value.__module__ == name:
                classes[f"{name}.{attribute}"] = vars(value).copy()
    return Attributes(modules, classes)


def replaced(before: Attributes, after: Attributes) -> set[str]:
    """Return names of attributes that were replaced, removed, or set by third-party code.

    Attributes that exist because a module was imported late do not count, nor do those that torch
    replaces in itself on such an import.
    """
    changed: dict[str, object] = {}
    gained: dict[str, object] = {}
    for earlier, later, is_watched in (
        (before.modules, after.modules, _is_public),
        (before.classes, after.classes, _is_method),
    ):
        for holder, held in earlier.items():
            now = later.get(holder, {})
            for name, value in held.items():
                other = now.get(name, _ABSENT)
                if other is value or _equal_constants(other, value):
                    continue
                if _is_counter(holder, value, other):
                    continue
                if is_watched(name, value):
                    changed[f"{holder}.{name}"] = other
                elif is_watched(name, other):
                    gained[f"{holder}.{name}"] = other
            for name in now.keys() - held.keys():
                if is_watched(name, now[name]):
                    gained[f"{holder}.{name}"] = now[name]
    if changed and after.modules_held() - before.modules_held():  # something was imported
        gained |= changed
        changed = {}
    return changed.keys() | {name for name, value in gained.items() if _is_foreign(value)}


def _is_counter(holder: str, value: object, other: object) -> bool:
    return holder.startswith(_COMPILER) and type(value) is type(other) is int


def _equal_constants(one: object, other: object) -> bool:
    return isinstance(one, _PLAIN) and type(one) is type(other) and one == other


def made_in(place: str, found: Attributes) -> set[str]:
    """Return names of attributes that are functions defined in a file or folder."""
    return {
        f"{holder}.{name}"
        for holder, held in found.holders()
        for name, value in held.items()
        if _file_of(value).startswith(place)
    }


def _file_of(value: object) -> str:
    """Source file of a function; empty for anything else."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    return value.__code__.co_filename if isinstance(value, FunctionType) else ""


def _is_foreign(value: object) -> bool:
    """Whether a function is defined outside of the compared packages and the standard library."""
    file = _file_of(value)
    homes = [
        str(getattr(sys.modules[top], "__path__", [_ABSENT])[0])
        for top in _HOMES
        if top in sys.modules
    ]
    own = ("<", *homes, os.path.dirname(os.__file__))
    return bool(file) and not file.startswith(own)


def settings() -> dict[str, object]:
    """Return name -> value of the settings that a run must restore."""
    gc.collect()  # garbage may hold files and process groups
    return process_state() | {name: read() for name, read in _torch_settings()}


def changed_settings(
    earlier: Mapping[str, object], before: Mapping[str, object], after: Mapping[str, object]
) -> Iterator[str]:
    """Yield a description of each setting that differs.

    Args:
        earlier: Settings before a run without the plugin, which ended at ``before``; shows how many
            process groups every run leaves.
    """
    allowed = {PROCESS_GROUPS: _count(before) - _count(earlier)}
    compiling = before.get(_COMPILED) != after.get(_COMPILED)
    for name in {**before, **after}:
        if name == _COMPILED or (compiling and _is_of_compile(name)):
            continue
        was, now = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if was != now and not (name in allowed and _count(after) <= _count(before) + allowed[name]):
            plain = isinstance(was, str | int | float) and isinstance(now, str | int | float)
            yield f"{name} (was {was!r}, is {now!r})" if plain else name


def _is_of_compile(setting: str) -> bool:
    return setting in _OF_COMPILE or any(part in setting for part in _VARIABLES_OF_COMPILE)


def _count(seen: Mapping[str, object]) -> int:
    found = seen.get(PROCESS_GROUPS, 0)
    return found if isinstance(found, int) else 0


def _count_parameters() -> int:
    """Count the parameters that something refers to; those of a run end with it."""
    from torch import nn

    return sum(issubclass(type(found), nn.Parameter) for found in gc.get_objects())


def _torch_settings() -> Iterator[tuple[str, Callable[[], Any]]]:
    if "torch" not in sys.modules:
        return
    import numpy as np
    import torch
    import torch.utils.deterministic as fills
    from torch import _tensor_str as printing
    from torch import distributed as dist
    from torch import overrides as _overrides
    from torch.nn.modules import module as _module
    from torch.optim import optimizer as _optimizer
    from torch.utils import _python_dispatch as dispatch

    backends = torch.backends
    yield "torch's default dtype", lambda: str(torch.get_default_dtype())
    yield "torch's default device", lambda: str(torch.get_default_device())
    yield "torch's number of threads", torch.get_num_threads
    yield "torch.is_grad_enabled()", torch.is_grad_enabled
    yield "torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled
    yield "torch.is_anomaly_enabled()", torch.is_anomaly_enabled
    yield "torch's deterministic algorithms", torch.get_deterministic_debug_mode
    yield (
        "torch.utils.deterministic.fill_uninitialized_memory",
        lambda: vars(fills).get("fill_uninitialized_memory"),
    )
    yield "torch's float32 matmul precision", torch.get_float32_matmul_precision
    yield "torch.is_autocast_enabled('cpu')", lambda: torch.is_autocast_enabled("cpu")
    yield "torch's print options", lambda: str(vars(printing.PRINT_OPTS))
    yield "torch.backends.cudnn.benchmark", lambda: backends.cudnn.benchmark
    yield "torch.backends.cudnn.deterministic", lambda: backends.cudnn.deterministic
    yield "torch.backends.mkldnn.enabled", lambda: backends.mkldnn.enabled
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        yield (
            f"torch.backends.cuda.{name}_sdp_enabled()",
            getattr(backends.cuda, f"{name}_sdp_enabled"),
        )
    overrides: Any = _overrides
    yield "torch's function modes", lambda: len(overrides._get_current_function_mode_stack())
    yield "torch's dispatch modes", lambda: len(dispatch._get_current_dispatch_mode_stack())
    for home in (_module, _optimizer):
        for name, held in vars(home).items():
            if name.startswith("_global_") and isinstance(held, dict):
                yield f"{home.__name__}.{name}", partial(len, held)
    autograd: Any = vars(torch._C)["_autograd"]
    yield (
        "torch's hooks for saved tensors",
        lambda: (
            autograd._saved_tensors_hooks_is_enabled(),
            autograd._top_saved_tensors_default_hooks(True) is None,
        ),
    )
    yield "torch.distributed.is_initialized()", dist.is_initialized
    yield PROCESS_GROUPS, lambda: len(dist.distributed_c10d._world.pg_map)
    yield _PARAMETERS, _count_parameters
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        yield _COMPILED, lambda: dynamo.counters["frames"]["total"]
    yield "numpy's treatment of errors", np.geterr
    yield "numpy's print options", lambda: str(np.get_printoptions())
