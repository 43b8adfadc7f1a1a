"""Static manifests: what a distribution declares about a plugin, read without importing it.

An entry point of the group ``ascend_run.manifests`` has the plugin's name and refers to a TOML file
in a package, ``package:file``. The file has a table of that name, with fields of the Manifest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import API_VERSION, Manifest, PluginLoadError
from ascend_run.plugin_api.version import in_api_range

from .offers import reason_of

if TYPE_CHECKING:
    from .discovery import Candidate

LARGEST_BYTES: Final = 1 << 16


@attrs.frozen(kw_only=True)
class StaticManifest:
    """The fields of a Manifest that a distribution declares; they have the same values there."""

    summary: str
    requires_api: str
    level: int = attrs.field(default=2, validator=attrs.validators.in_((0, 1, 2)))

    def differences(self, manifest: Manifest) -> list[str]:
        """Return each field whose value differs from the manifest's, with both values."""
        return [
            f"{name} is {value!r} and {getattr(manifest, name)!r}"
            for name, value in attrs.asdict(self).items()
            if value != getattr(manifest, name)
        ]


def static_manifest(candidate: Candidate) -> StaticManifest | None:
    """Read the static manifest of a plugin; None if its distribution has none.

    Raises:
        PluginLoadError: It cannot be read, or requires another version of the API.
    """
    if not candidate.manifest_file:
        return None
    try:
        found = _parsed(_read(candidate.manifest_file), candidate.name)
        problem = api_problem(found.requires_api, candidate)
    except (OSError, ValueError, TypeError, ImportError) as error:
        place = candidate.manifest_file
        problem = f"has a static manifest, {place}, that is invalid: {reason_of(error)}"
    if problem:
        raise PluginLoadError(f"'{candidate.name}' of {candidate.offered_by} {problem}")
    return found


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
    from importlib.util import find_spec  # late: few installations have static manifests

    module, _, file = place.partition(":")
    top, *below = module.split(".")
    spec = find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(folder, *below, file)
        if os.path.isfile(path):
            with open(path, "rb") as stream:
                content = stream.read(LARGEST_BYTES + 1)
            if len(content) > LARGEST_BYTES:
                raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
            return content.decode()
    raise ValueError("there is no such file; is it in the wheel, as package data?")


def _parsed(text: str, name: str) -> StaticManifest:
    import tomllib  # late, as above

    tables = tomllib.loads(text)
    fields: Any = tables.get(name)
    if not isinstance(fields, Mapping):
        raise ValueError(f"it has no table [{name}]")
    known = [field.name for field in attrs.fields(StaticManifest)]
    if unknown := sorted(fields.keys() - {*known}):
        raise ValueError(f"unknown: {', '.join(unknown)}; its fields are {', '.join(known)}")
    for text in ("summary", "requires_api"):
        if not isinstance(found := fields.get(text), str):
            raise ValueError(f"{text} in [{name}] is {found!r}; expected a text")
    return StaticManifest(**fields)
