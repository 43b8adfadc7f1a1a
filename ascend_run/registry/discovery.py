"""Which plugins are installed: entry-point metadata only, so nothing that no one named runs."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email.parser import HeaderParser
from importlib.metadata import Distribution, EntryPoint, distribution, distributions

import attrs

from ascend_run.plugin_api import AscendRunError, PluginLoadError, PluginResolutionError

from .kinds import GROUPS, Kind, Plugin

OWN_DISTRIBUTION = "ascend-run"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
"""As Manifest has it."""


@attrs.frozen(kw_only=True)
class Candidate:
    """A plugin that a distribution offers; its code has not run."""

    name: str
    group: str
    value: str
    """``package.module:Class``."""
    distribution: str
    version: str
    entry_point: EntryPoint = attrs.field(eq=False, repr=False)

    @property
    def kind(self) -> Kind:
        """What its group says it is."""
        return GROUPS[self.group]

    @property
    def first_party(self) -> bool:
        """Whether it is ours: torch-free to import, so its manifest may be read unasked."""
        ours = self.distribution == OWN_DISTRIBUTION
        return ours and self.value.startswith("ascend_run.plugins.")

    @property
    def offered_by(self) -> str:
        """The distribution, with its version."""
        return f"{self.distribution} {self.version}"


@attrs.frozen
class Loaded:
    """What came of importing plugins: each name is in one of the two."""

    classes: Mapping[str, Plugin]
    failures: Mapping[str, AscendRunError]


class Catalogue(Mapping[str, Candidate]):
    """Every plugin that can be named, by each of its names.

    Args:
        candidates: All that is offered; a name offered more than once cannot be named.
        unreadable: Distributions whose metadata cannot be read -> the reason.
    """

    def __init__(
        self, candidates: Iterable[Candidate], unreadable: Mapping[str, str] | None = None
    ) -> None:
        offers: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            offers.setdefault(candidate.name, []).append(candidate)
        self.shadows = {n: _shadows(found) for n, found in offers.items() if _shadows(found)}
        """Name of one of ours -> what else has it, and cannot be chosen."""
        for name, others in self.shadows.items():
            offers[name] = [found for found in offers[name] if found not in others]
        self._unique = {n: found[0] for n, found in sorted(offers.items()) if len(found) == 1}
        self.duplicates = {n: tuple(found) for n, found in offers.items() if len(found) > 1}
        """Name -> everything that offers it."""
        self.broken = {name: _several(found) for name, found in self.duplicates.items()}
        """Name -> why it cannot be had, as far as metadata tells."""
        self.unreadable = dict(unreadable or {})

    def __getitem__(self, name: str) -> Candidate:
        return self._unique[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unique)

    def __len__(self) -> int:
        return len(self._unique)

    def load_each(self, names: Iterable[str]) -> Loaded:
        """Import these plugins and no others; failures are kept, not raised."""
        # Late: shell completion and --help read metadata only, and need no stevedore.
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
        for name, outcome in import_plugins(wanted, self).items():
            if isinstance(outcome, AscendRunError):
                failures[name] = outcome
            else:
                classes[name] = outcome
        return Loaded(classes, failures)

    def load(self, names: Iterable[str]) -> dict[str, Plugin]:
        """Import these plugins and no others.

        Raises:
            PluginResolutionError: A name is unknown.
            PluginLoadError: A plugin cannot be imported or used.
        """
        loaded = self.load_each(names)
        if loaded.failures:
            raise joint_refusal(loaded.failures.values())
        return dict(loaded.classes)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self, n=3, cutoff=0.5)
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        offering = sorted({candidate.offered_by for candidate in self.values()})
        return (
            f"unknown plugin '{name}'{nearest}; searched the entry points {', '.join(GROUPS)} of "
            f"{', '.join(offering) or 'no distribution'} (Python in {sys.prefix})"
        )


def joint_refusal(
    failures: Iterable[AscendRunError], problems: Sequence[str] = ()
) -> AscendRunError:
    """One refusal for plugins that cannot be had and for what else is wrong with the set."""
    refused = list(failures)
    load_only = not problems and all(isinstance(error, PluginLoadError) for error in refused)
    kind = PluginLoadError if load_only else PluginResolutionError
    return kind("cannot enable this set", [*(str(error) for error in refused), *problems])


def discover() -> Catalogue:
    """Read the entry points of every distribution on ``sys.path``; import nothing."""
    candidates: list[Candidate] = []
    unreadable: dict[str, str] = {}
    for name in _offering_distributions(unreadable):
        try:
            found = distribution(name)  # of two installations, the one that imports find
            _, version = _identity(found)
            for entry_point in found.entry_points:
                if entry_point.group not in GROUPS:
                    continue
                if not _NAME.fullmatch(entry_point.name):
                    unreadable[name] = (
                        f"its plugin {entry_point.name[:60]!a} can never be named: names are "
                        "kebab-case, such as 'my-feature'"
                    )
                    continue
                candidates.append(_candidate(entry_point, name, version))
        except Exception as error:  # a broken third party must not stop runs that do not name it
            unreadable[name] = f"its entry points cannot be read: {_told(error)}"
    return Catalogue(candidates, unreadable)


def _offering_distributions(unreadable: dict[str, str]) -> list[str]:
    """Normalised names of the distributions whose entry points mention a group of ours."""
    names: set[str] = set()
    for found in distributions():
        try:
            text = found.read_text("entry_points.txt") or ""
            if any(group in text for group in GROUPS):
                names.add(_identity(found)[0])
        except Exception as error:  # as above
            unreadable[str(getattr(found, "_path", found))] = (
                f"its metadata cannot be read: {_told(error)}"
            )
    return sorted(names)


def _identity(found: Distribution) -> tuple[str, str]:
    """Normalised name and version, from the head of the metadata alone: the description below it
    may be of any size.

    Raises:
        ValueError: There is no name.
    """
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    head = HeaderParser().parsestr(text.partition("\n\n")[0])
    if not head["Name"]:
        raise ValueError("it has no Name")
    version = "".join(letter if letter.isprintable() else "?" for letter in head["Version"] or "?")
    return normalised(head["Name"]), version[:40]


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def normalised(distribution_name: str) -> str:
    """A distribution's name as the packaging standard compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution_name).lower()


def _candidate(entry_point: EntryPoint, owner: str, version: str) -> Candidate:
    return Candidate(
        name=entry_point.name,
        group=entry_point.group,
        value=entry_point.value,
        distribution=owner,
        version=version,
        entry_point=entry_point,
    )


def _shadows(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """What has the name of one of ours without being it."""
    ours = [candidate for candidate in found if candidate.first_party]
    return tuple(c for c in found if not c.first_party) if len(ours) == 1 else ()


def _several(found: Sequence[Candidate]) -> str:
    offers = " and ".join(
        f"{candidate.offered_by} ({candidate.group}: {candidate.value})" for candidate in found
    )
    return f"is offered more than once, by {offers}; uninstall all but one"
