"""Find installed plugins by their entry-point metadata; only enabled plugins are imported. The
plugin API and attrs are not imported before, which would double the time of a listing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, NamedTuple

from .kinds import GROUPS, MANIFESTS, Kind, Plugin
from .offers import OWN_DISTRIBUTION, offers_in

if TYPE_CHECKING:
    from ascend_run.plugin_api import AscendRunError


class Candidate(NamedTuple):
    """A plugin that a distribution provides; it has not been imported."""

    name: str
    group: str
    value: str  #: ``package.module:Class``.
    distribution: str
    version: str
    entry_point: EntryPoint
    manifest_file: str = ""  #: ``package:file`` of its static manifest; empty if it has none.

    @property
    def kind(self) -> Kind:
        """The kind of plugins in its group."""
        return GROUPS[self.group]

    @property
    def first_party(self) -> bool:
        """Whether it is built-in: importing it is torch-free, so its manifest may be read."""
        ours = self.distribution == OWN_DISTRIBUTION
        return ours and self.value.startswith("ascend_run.plugins.")

    @property
    def category(self) -> str:
        """For a built-in plugin, the group folder that it is in, such as ``sequence``."""
        return self.value.split(".")[2] if self.first_party else ""

    @property
    def offered_by(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version}"


class Loaded(NamedTuple):
    """The result of importing plugins: each name is in exactly one of the two."""

    classes: Mapping[str, Plugin]
    failures: Mapping[str, AscendRunError]


class Catalogue(Mapping[str, Candidate]):
    """All plugins that can be enabled, by each of their names.

    Args:
        candidates: All installed plugins; a name with several candidates cannot be used.
        unreadable: Distributions whose metadata cannot be read -> the reason.
    """

    def __init__(
        self, candidates: Iterable[Candidate], unreadable: Mapping[str, str] | None = None
    ) -> None:
        offers: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            offers.setdefault(candidate.name, []).append(candidate)
        self.shadows = {n: _shadows(found) for n, found in offers.items() if _shadows(found)}
        """Name of a built-in plugin -> other candidates of that name, which cannot be used."""
        for name, others in self.shadows.items():
            offers[name] = [found for found in offers[name] if found not in others]
        self._unique = {n: found[0] for n, found in sorted(offers.items()) if len(found) == 1}
        self.duplicates = {n: tuple(found) for n, found in offers.items() if len(found) > 1}
        """Name -> all candidates of that name."""
        self.broken = {name: _several(found) for name, found in self.duplicates.items()}
        """Name -> why it cannot be used, as far as metadata shows."""
        self.unreadable = dict(unreadable or {})

    def __getitem__(self, name: str) -> Candidate:
        return self._unique[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unique)

    def __len__(self) -> int:
        return len(self._unique)

    def load_each(self, names: Iterable[str]) -> Loaded:
        """Import only these plugins; failures are collected, not raised."""
        from ascend_run.plugin_api import AscendRunError, PluginLoadError, PluginResolutionError

        from .loading import import_plugins

        classes: dict[str, Plugin] = {}
        failures: dict[str, AscendRunError] = {}
        wanted: list[Candidate] = []
        for name in sorted(set(names)):
            if name in self.broken:
                failures[name] = PluginLoadError(f"'{name}' {self.broken[name]}")
            elif name in self:
                wanted.append(self[name])
            else:
                failures[name] = PluginResolutionError(self._unknown(name))
        for name, result in import_plugins(wanted, self).items():
            if isinstance(result, AscendRunError):
                failures[name] = result
            else:
                classes[name] = result
        return Loaded(classes, failures)

    def load(self, names: Iterable[str]) -> dict[str, Plugin]:
        """Import only these plugins.

        Raises:
            PluginResolutionError: A name is unknown.
            PluginLoadError: A plugin cannot be imported or used.
        """
        loaded = self.load_each(names)
        if loaded.failures:
            headline = f"cannot load {', '.join(loaded.failures)}"
            raise joint_refusal(loaded.failures.values(), headline=headline)
        return dict(loaded.classes)

    def _unknown(self, name: str) -> str:
        import difflib

        near = difflib.get_close_matches(name, self, n=3, cutoff=0.7)
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        if options := [*_options_named(name)]:
            nearest += f"; without a plugin there is the setting {' or '.join(options)}"
        offering = sorted({candidate.offered_by for candidate in self.values()})
        return (
            f"unknown plugin '{name}'{nearest}; searched the entry points {', '.join(GROUPS)} of "
            f"{', '.join(offering) or 'no distribution'} (Python in {sys.prefix})"
        )


def _options_named(name: str) -> Iterator[str]:
    """Yield the options of the core that have all words of a name, and the page of each."""
    import attrs

    from ascend_run.types.config import RunConfig

    words = name.lower().split("-")
    for section in attrs.fields(RunConfig):
        factory = getattr(section.default, "factory", type(None))
        for option in attrs.fields(factory) if attrs.has(factory) else ():
            parts = option.name.split("_")
            if all(any(word.startswith(part) for part in parts) for word in words):
                page = option.metadata.get("page")
                yield f"{section.name}.{option.name}" + (f" ({page})" if page else "")


def joint_refusal(
    failures: Iterable[AscendRunError],
    problems: Sequence[str] = (),
    headline: str = "cannot enable this set",
) -> AscendRunError:
    """Combine load failures and other problems of a set of plugins into one error."""
    from ascend_run.plugin_api import PluginLoadError, PluginResolutionError

    refused = list(failures)
    load_only = not problems and all(isinstance(error, PluginLoadError) for error in refused)
    kind = PluginLoadError if load_only else PluginResolutionError
    return kind(headline, [*(str(error) for error in refused), *problems])


def discover() -> Catalogue:
    """Read the entry points of every distribution on ``sys.path``; import nothing."""
    offers, unreadable = offers_in((*GROUPS, MANIFESTS), "plugin")
    files = {
        (offer.distribution, offer.entry_point.name): offer.entry_point.value
        for offer in offers
        if offer.entry_point.group == MANIFESTS
    }
    candidates = [
        Candidate(
            name=offer.entry_point.name,
            group=offer.entry_point.group,
            value=offer.entry_point.value,
            distribution=offer.distribution,
            version=offer.version,
            manifest_file=files.get((offer.distribution, offer.entry_point.name), ""),
            entry_point=offer.entry_point,
        )
        for offer in offers
        if offer.entry_point.group != MANIFESTS
    ]
    return Catalogue(candidates, unreadable)


def _shadows(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that have the name of a built-in plugin without being it."""
    ours = [candidate for candidate in found if candidate.first_party]
    return tuple(c for c in found if not c.first_party) if len(ours) == 1 else ()


def _several(found: Sequence[Candidate]) -> str:
    offers = " and ".join(
        f"{candidate.offered_by} ({candidate.group}: {candidate.value})" for candidate in found
    )
    return f"is provided more than once, by {offers}; uninstall all but one"
