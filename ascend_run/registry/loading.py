"""Import plugins through stevedore, and check that they can be used."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import EntryPoint
from types import NoneType
from typing import Any, Final, NoReturn

import attrs
from stevedore.extension import Extension
from stevedore.named import NamedExtensionManager

from ascend_run.plugin_api import (
    API_VERSION,
    Claim,
    Condition,
    LinkPlace,
    Manifest,
    Maturity,
    Numerics,
    PluginLoadError,
    Support,
)
from ascend_run.plugin_api.errors import UnknownFields

from .discovery import Candidate
from .kinds import CLAIMS, GROUPS, Plugin, kind_of
from .offers import reason_of
from .static_manifest import StaticManifest, api_problem, static_manifest

SLOW_SECONDS: Final = 0.5
"""Imports that take longer are reported to the user."""
_TYPES: Final[Mapping[str, tuple[Any, Any]]] = {
    "summary": (str, None),
    "aliases": (tuple, str),
    "claims": (tuple, Claim),
    "requires": (tuple, (str, Condition)),
    "conflicts": (Mapping, str),
    "after": (tuple, str),
    "idle": ((Condition, NoneType), None),
    "numerics": (Numerics, None),
    "maturity": (Maturity, None),
    "platforms": (Mapping, Support),
    "forward_links": (Mapping, LinkPlace),
}
"""Field of a manifest -> its type, and the type of its items or values."""


class _NamedPlugins(NamedExtensionManager[Any]):
    """stevedore's manager, with the entry points given.

    stevedore reads its own list from a cache file that any process of the user may write and that
    does not record which distribution owns an entry point.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._entry_points = [candidate.entry_point for candidate in candidates]
        self._candidates = {candidate.name: candidate for candidate in candidates}
        self.failures: dict[str, str] = {}
        """Name -> why it cannot be imported."""
        super().__init__(
            namespace="ascend_run",
            names=[candidate.name for candidate in candidates],
            on_load_failure_callback=self._record,
            on_missing_entrypoints_callback=None,
        )

    def list_entry_points(self) -> list[EntryPoint]:
        return self._entry_points

    def _load_one_plugin(self, ep: EntryPoint, *args: Any, **kwargs: Any) -> Extension[Any] | None:
        try:
            with _guarded_import(self._candidates[ep.name]) as interrupted:
                return super()._load_one_plugin(ep, *args, **kwargs)
        except SystemExit as error:
            raise ImportError(f"it called sys.exit({error.code!r})") from error
        except AssertionError as error:  # stevedore does not catch these
            raise ImportError(f"AssertionError: {error}") from error
        except Exception:
            raise
        except BaseException as error:
            if interrupted:
                raise
            raise ImportError(f"it raised {type(error).__name__}") from error

    def _record(self, manager: object, entry_point: EntryPoint, error: BaseException) -> None:
        candidate = self._candidates[entry_point.name]
        reason = reason_of(error)
        self.failures[candidate.name] = (
            f"was written for a newer plugin API: {reason}, and this is API {API_VERSION}; install "
            f"a newer ascend-run, or a release of {candidate.distribution} for this API"
            if isinstance(error, UnknownFields)
            else f"failed to import {candidate.value}: {type(error).__name__}: {reason}"
        )


@contextmanager
def _guarded_import(candidate: Candidate) -> Iterator[list[int]]:
    """Guard the import of third-party code: it can neither end the process nor write to stdout.

    Yields:
        A list that is non-empty once the user has pressed Ctrl-C.
    """
    interrupted: list[int] = []
    if candidate.first_party:
        yield interrupted
        return

    def raise_on_exit(code: int) -> NoReturn:
        raise ImportError(f"it called os._exit({code!r})")

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    def report_slow_import() -> None:
        print(f"loading '{candidate.name}' of {candidate.offered_by} ...", file=sys.stderr)

    slow, exit_process = threading.Timer(SLOW_SECONDS, report_slow_import), os._exit
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handles_signal = default and threading.current_thread() is threading.main_thread()
    slow.daemon = True
    slow.start()
    try:
        os._exit = raise_on_exit  # type: ignore[assignment]
        if handles_signal:
            signal.signal(signal.SIGINT, interrupt)
        with redirect_stdout(sys.stderr):
            yield interrupted
    finally:
        os._exit = exit_process
        if handles_signal:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        slow.cancel()


def import_plugins(
    candidates: Sequence[Candidate], catalogue: Mapping[str, Candidate]
) -> dict[str, Plugin | PluginLoadError]:
    """Import plugins.

    Args:
        catalogue: All candidates, to check that an alias and its canonical name are one class.

    Returns:
        Name -> its class, or why it cannot be used.
    """
    declared = {candidate.name: static_manifest(candidate) for candidate in candidates}
    results: dict[str, Plugin | PluginLoadError] = {
        name: PluginLoadError(problem) for name, (_, problem) in declared.items() if problem
    }
    candidates = [candidate for candidate in candidates if candidate.name not in results]
    manager = _NamedPlugins(candidates)
    loaded = {extension.name: extension.plugin for extension in manager.extensions}
    for candidate in candidates:
        problem = manager.failures.get(candidate.name)
        if problem is None:
            try:
                problem = _unusable(candidate, loaded[candidate.name], catalogue) or _differs(
                    candidate, declared[candidate.name][0], loaded[candidate.name]
                )
            except Exception as error:  # third-party attributes may raise anything
                problem = f"cannot be read: {type(error).__name__}: {reason_of(error)}"
        if problem:
            results[candidate.name] = PluginLoadError(
                f"'{candidate.name}' of {candidate.offered_by} {problem}"
            )
        else:
            results[candidate.name] = loaded[candidate.name]
    return results


def _ill_typed(manifest: Manifest) -> str | None:
    """A message for the first field of a manifest with a wrong type; None if all are right."""
    for name, (kind, items) in _TYPES.items():
        value = getattr(manifest, name)
        parts = value.values() if isinstance(value, Mapping) else value
        if not isinstance(value, kind) or (items and not all(isinstance(x, items) for x in parts)):
            return f"has a manifest whose {name} is {value!r:.80}, which is of the wrong type"
    return None


def _unusable(candidate: Candidate, plugin: Any, catalogue: Mapping[str, Candidate]) -> str | None:
    """Why this plugin does not match the API or its entry point; None if it does."""
    manifest = getattr(plugin, "manifest", None)
    if not isinstance(plugin, type) or not isinstance(manifest, Manifest):
        return f"is not a plugin: {candidate.value} must be a class with a Manifest as 'manifest'"
    if problem := _ill_typed(manifest) or api_problem(manifest.requires_api, candidate):
        return problem
    options = getattr(plugin, "config_class", None)
    if options is not None and not (isinstance(options, type) and attrs.has(options)):
        return f"has the config_class {options!r}; it must be an attrs class"
    if candidate.name not in (manifest.name, *manifest.aliases):
        names = ", ".join((manifest.name, *manifest.aliases))
        return f"has a manifest for other names ({names}); rename its entry point or its manifest"
    canonical = catalogue.get(manifest.name)
    if canonical is None or canonical.value != candidate.value:
        return f"is an alias of '{manifest.name}', which has no entry point to the same class"
    if kind_of(plugin) is not candidate.kind:
        expected = CLAIMS.get(candidate.kind, "none of " + ", ".join(CLAIMS.values()))
        home = next(group for group, kind in GROUPS.items() if kind is kind_of(plugin))
        return (
            f"is listed in {candidate.group}, whose plugins claim {expected}; by its hooks it is a "
            f"{kind_of(plugin)}, which belongs in {home}"
        )
    return None


def _differs(candidate: Candidate, declared: StaticManifest | None, plugin: Plugin) -> str | None:
    """Why a plugin is not what its static manifest declares; None if it is."""
    differences = [] if declared is None else declared.differences(plugin)
    if not differences:
        return None
    return (
        f"has a static manifest, {candidate.manifest_file}, that differs from its Manifest: "
        f"{', '.join(differences)}; make them equal"
    )
