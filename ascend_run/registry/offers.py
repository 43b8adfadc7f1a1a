"""Entry points of installed distributions, read from their metadata without importing them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import NamedTuple

OWN_DISTRIBUTION = "ascend-run"
_FIELD = re.compile(r"^(name|version):[ \t]*(.*?)[ \t]*$", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
"""As in ``Manifest.name``."""


class Offer(NamedTuple):
    """One entry point and its distribution."""

    entry_point: EntryPoint
    distribution: str  #: Normalized.
    version: str


def offers_in(
    groups: Collection[str], kind: str, only: str | None = None
) -> tuple[list[Offer], dict[str, str]]:
    """Read the entry points of every distribution on ``sys.path``; import nothing.

    Args:
        groups: Entry-point groups.
        kind: What their entry points are called in messages.
        only: Read this distribution only.

    Returns:
        The entry points, and distributions that cannot be read -> why. A broken third-party package
        must not affect commands that do not use it.
    """
    offers: list[Offer] = []
    unreadable: dict[str, str] = {}
    installed: set[str] = set()
    for found in distributions(name=only):
        name = ""
        try:
            if (installed_as := _installed_name(found)) in installed:
                continue  # of several installations, the first is imported
            installed.add(installed_as)
            text = found.read_text("entry_points.txt") or ""
            if not any(group in text for group in groups):
                continue
            name, version = _identity(found)
            if name != installed_as:
                raise ValueError(f"they are in the folder of {installed_as!a}")
            for entry_point in found.entry_points:
                if entry_point.group not in groups:
                    continue
                if not _NAME.fullmatch(entry_point.name):
                    unreadable[name] = (
                        f"its {kind} {entry_point.name[:60]!a} has an invalid name: names are "
                        "kebab-case, such as 'my-feature'"
                    )
                    continue
                offers.append(Offer(entry_point=entry_point, distribution=name, version=version))
        except Exception as error:  # third-party metadata may be broken in any way
            what = "entry points" if name else "metadata"
            where = name or str(getattr(found, "_path", found))
            why = f"{type(error).__name__}: {reason_of(error)}"
            unreadable[where] = f"its {what} cannot be read: {why}"
    return sorted(offers, key=lambda offer: offer.distribution), dict(sorted(unreadable.items()))


def normalised(distribution_name: str) -> str:
    """Return a distribution's name as normalized by PEP 503."""
    return re.sub(r"[-_.]+", "-", distribution_name).lower()


def _installed_name(found: Distribution) -> str:
    """Return the name by which ``importlib.metadata.distribution`` finds it: its folder's, if that
    has one; its metadata is not read then."""
    stem, suffix = os.path.splitext(os.path.basename(str(getattr(found, "_path", ""))))
    if suffix in (".dist-info", ".egg-info"):
        return normalised(stem.partition("-")[0])
    return _identity(found)[0]


def _identity(found: Distribution) -> tuple[str, str]:
    """Normalized name and version, from the header of the metadata only, since the description
    below it may be of any size.

    Raises:
        ValueError: The metadata has no name.
    """
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    # By a pattern: email's parser takes twenty times as long, which counts with many packages.
    fields = _FIELD.findall(text.partition("\n\n")[0])
    head = {name.lower(): value for name, value in reversed(fields)}
    if not head.get("name"):
        raise ValueError("it has no Name")
    version = head.get("version") or "?"
    shown = "".join(letter if letter.isprintable() else "?" for letter in version)
    return normalised(head["name"]), shown[:40]


def reason_of(error: BaseException) -> str:
    """Return the message of an exception on one line, without what attrs adds for programs."""
    adds_more = type(error) in (TypeError, ValueError) and len(error.args) > 1
    return " ".join(str(error.args[0] if adds_more else error).split())[:300] or "no message"
