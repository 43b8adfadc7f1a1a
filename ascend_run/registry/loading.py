"""Import named plugins through stevedore, and refuse what cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import attrs
from stevedore.extension import Extension
from stevedore.named import NamedExtensionManager

from ascend_run.plugin_api import API_VERSION, Manifest, PluginLoadError

from .discovery import Candidate
from .kinds import CLAIMS, GROUPS, Plugin, kind_of


class _NamedPlugins(NamedExtensionManager[Any]):
    """stevedore's manager over entry points that keep their distribution.

    Its own list comes from a cache file that any process of the user may write and that forgets
    which distribution owns an entry point; so the list is given.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._entry_points = [candidate.entry_point for candidate in candidates]
        self.failures: dict[str, str] = {}
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
            return super()._load_one_plugin(ep, *args, **kwargs)
        except SystemExit as error:
            raise ImportError(f"it called sys.exit({error.code!r})") from error
        except AssertionError as error:  # stevedore lets these through
            raise ImportError(f"AssertionError: {error}") from error

    def _record(self, manager: object, entry_point: EntryPoint, error: BaseException) -> None:
        reason = " ".join(str(error).split()) or "no message"
        self.failures[entry_point.name] = f"{type(error).__name__}: {reason}"


def import_plugins(
    candidates: Sequence[Candidate], catalogue: Mapping[str, Candidate]
) -> dict[str, Plugin | PluginLoadError]:
    """Each candidate's class, or why it cannot be used.

    Args:
        catalogue: All candidates, to see that an alias and its canonical name are one class.
    """
    manager = _NamedPlugins(candidates)
    loaded = {extension.name: extension.plugin for extension in manager.extensions}
    outcomes: dict[str, Plugin | PluginLoadError] = {}
    for candidate in candidates:
        problem: str | None
        if candidate.name in manager.failures:
            problem = f"failed to import {candidate.value}: {manager.failures[candidate.name]}"
        else:
            problem = _unusable(candidate, loaded[candidate.name], catalogue)
        if problem:
            outcomes[candidate.name] = PluginLoadError(
                f"'{candidate.name}' of {candidate.offered_by} {problem}"
            )
        else:
            outcomes[candidate.name] = loaded[candidate.name]
    return outcomes


def _unusable(candidate: Candidate, plugin: Any, catalogue: Mapping[str, Candidate]) -> str | None:
    """What of this plugin's declaration contradicts the API or its entry point; None if nothing."""
    manifest = getattr(plugin, "manifest", None)
    if not isinstance(plugin, type) or not isinstance(manifest, Manifest):
        return f"is no plugin: {candidate.value} must be a class with a Manifest as 'manifest'"
    if manifest.api_version != API_VERSION:
        return (
            f"was written for plugin API {manifest.api_version} and this is API {API_VERSION}; "
            f"install a release of {candidate.distribution} made for it"
        )
    options = getattr(plugin, "config_class", None)
    if options is not None and not (isinstance(options, type) and attrs.has(options)):
        return f"has the config_class {options!r}; it must be an attrs class"
    if candidate.name not in (manifest.name, *manifest.aliases):
        names = ", ".join((manifest.name, *manifest.aliases))
        return f"has a manifest for other names ({names}); rename its entry point or its manifest"
    canonical = catalogue.get(manifest.name)
    if canonical is None or canonical.value != candidate.value:
        return f"is an alias of '{manifest.name}', which has no entry point to the same class"
    if kind_of(manifest) is not candidate.kind:
        expected = CLAIMS.get(candidate.kind, "none of " + ", ".join(CLAIMS.values()))
        home = next(group for group, kind in GROUPS.items() if kind is kind_of(manifest))
        return (
            f"stands in {candidate.group}, whose plugins claim {expected}; its manifest is that of "
            f"a {kind_of(manifest)}, which belongs in {home}"
        )
    return None
