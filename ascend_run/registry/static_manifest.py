"""Static manifests: what a distribution declares about a plugin, read without importing it.

An entry point of the group ``ascend_run.manifests`` has the plugin's name and refers to a TOML file
in a package, ``package:file``. The file has a table of that name, with fields of the Manifest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ascend_run.types.api_version import API_VERSION, in_api_range
from ascend_run.types.declarations import Claim, Maturity, Numerics, Support

from .offers import reason_of

if TYPE_CHECKING:
    from .discovery import Candidate
    from .kinds import Plugin

LARGEST_BYTES: Final = 1 << 16
_VALUES: Final[Mapping[str, Collection[object]]] = {
    "level": [0, 1, 2, 3],
    "numerics": [*Numerics],
    "maturity": [*Maturity],
    "platforms": [*Support],
    "claims": [*Claim],
}
"""Field -> the values of it or of its items."""
_FORMS: Final[Mapping[str, tuple[type, str]]] = {
    "level": (int, ""),
    "platforms": (dict, "a table, each value "),
    "claims": (list, "a list, each item "),
}


class StaticManifest(NamedTuple):
    """Declared fields of a Manifest, with the same values as there. None: not declared."""

    summary: str
    requires_api: str
    level: int = 2
    numerics: str | None = None
    maturity: str | None = None
    platforms: Mapping[str, str] | None = None
    claims: tuple[str, ...] | None = None
    """All of the plugin's claims: also those that its provider hooks imply."""

    @classmethod
    def of(cls, plugin: Plugin) -> StaticManifest:
        """Return the static manifest that declares all fields of an imported plugin."""
        from ascend_run.plugin_api.implementations import claims_of  # late: imports attrs

        values = {name: getattr(plugin.manifest, name) for name in cls._fields}
        return cls(**{**values, "claims": claims_of(plugin)})

    def differences(self, plugin: Plugin) -> list[str]:
        """Return each declared field whose value differs from the plugin's, with both values."""
        import json  # late, as above

        return [
            f"{name} is {json.dumps(declared)} and {json.dumps(found)}"
            for name, declared, found in zip(self._fields, self, self.of(plugin), strict=True)
            if declared not in (None, found)
        ]


def static_manifest(candidate: Candidate) -> tuple[StaticManifest | None, str]:
    """Read the static manifest of a plugin.

    Returns:
        None if its distribution has none, and why the plugin cannot be used: it is invalid, or
        requires another version of the API.
    """
    if not candidate.manifest_file:
        return None, ""
    try:
        fields = _table(_read(candidate.manifest_file), candidate.name)
        requires_api = fields.get("requires_api")
        # First: a newer API may have other fields.
        problem = isinstance(requires_api, str) and api_problem(requires_api, candidate)
        found = None if problem else _checked(fields, candidate.name)
    except (OSError, ValueError, TypeError, ImportError) as error:
        where, why = candidate.manifest_file, reason_of(error)
        found, problem = None, f"has a static manifest, {where}, that is invalid: {why}"
    return found, f"'{candidate.name}' of {candidate.offered_by} {problem}" if problem else ""


def api_problem(requires_api: str, candidate: Candidate) -> str | None:
    """Return why a plugin that requires this range of API versions cannot be used.

    Raises:
        ValueError: It is not a range.
    """
    if in_api_range(requires_api):
        return None
    return (
        f"requires plugin API {requires_api} and this is API {API_VERSION}; install a release of "
        f"{candidate.distribution} for it, or one of ascend-run with that API"
    )


def _read(place: str) -> str:
    """Read ``package.subpackage:file``; the top package is located, not imported."""
    from importlib.util import find_spec  # late: shell completion reads no static manifest

    module, _, file = place.partition(":")
    top, *below = module.split(".")
    spec = find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        with suppress(FileNotFoundError), open(os.path.join(folder, *below, file), "rb") as stream:
            content = stream.read(LARGEST_BYTES + 1)
            if len(content) > LARGEST_BYTES:
                raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
            return content.decode()
    raise ValueError("there is no such file; is it in the wheel, as package data?")


def _table(text: str, name: str) -> Mapping[str, Any]:
    fields: Any = _parsed(text).get(name)
    if not isinstance(fields, Mapping):
        raise ValueError(f"it has no table [{name}]")
    return fields


@functools.cache
def _parsed(text: str) -> Mapping[str, Any]:
    """Parse a file once, for every plugin in it and every set of plugins that is tried."""
    import tomllib  # late, as above

    return tomllib.loads(text)


def _checked(fields: Mapping[str, Any], name: str) -> StaticManifest:
    known = StaticManifest._fields
    if unknown := sorted(fields.keys() - {*known}):
        raise ValueError(f"unknown: {', '.join(unknown)}; its fields are {', '.join(known)}")
    for field in ("summary", "requires_api", *fields):
        if expected := _misfit(field, value := fields.get(field)):
            raise ValueError(f"{field} in [{name}] is {value!r}; expected {expected}")
    claims = {"claims": tuple(fields["claims"])} if "claims" in fields else {}
    return StaticManifest(**{**fields, **claims})


def _misfit(field: str, value: Any) -> str:
    """Return what the value of a field must be if it is not; else an empty text."""
    form, prefix = _FORMS.get(field, (str, ""))
    values = _VALUES.get(field)
    items = value.values() if form is dict is type(value) else value if form is list else [value]
    if type(value) is form and (values is None or all(item in values for item in items)):
        return ""
    return prefix + ("a text" if values is None else f"one of {', '.join(map(str, values))}")
