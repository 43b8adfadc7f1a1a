"""The exact versions of a run's plugins: compared across ranks and stored with the run."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from .discovery import Catalogue
from .kinds import Plugin
from .resolution import Resolution


def plugin_lock(resolution: Resolution, catalogue: Catalogue) -> dict[str, dict[str, str]]:
    """Return plugin name -> ``distribution``, ``version`` and ``sha256`` of its code.

    The hash covers the hashes in the distribution's RECORD; for an editable installation, the files
    of the plugin itself.
    """
    locked: dict[str, dict[str, str]] = {}
    for plugin in resolution.order:
        candidate = catalogue[plugin.manifest.name]
        owner = candidate.entry_point.dist
        assert owner is not None, f"{candidate.name}: discovery sets the distribution"
        locked[candidate.name] = {
            "distribution": candidate.distribution,
            "version": candidate.version,
            "sha256": _digest(_recorded_files(owner) or _source_files(plugin)),
        }
    return locked


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _recorded_files(owner: Distribution) -> dict[str, str]:
    """Path -> hash of every importable file; empty for an editable installation.

    Scripts and the installer's own files are left out: they contain the installation path and the
    installer, which may differ between nodes that run the same code.
    """
    if owner.read_text("RECORD") is None or _is_editable(owner):
        return {}
    return {
        file.as_posix(): file.hash.value
        for file in owner.files or ()
        if file.hash is not None
        and ".." not in file.parts
        and not file.parts[0].endswith(".dist-info")
    }


def _is_editable(owner: Distribution) -> bool:
    origin: Any = json.loads(owner.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


def _source_files(plugin: Plugin) -> dict[str, str]:
    """Path -> hash of the plugin's module, or of its package's modules."""
    path = Path(sys.modules[plugin.__module__].__file__ or "")
    modules = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    return {
        module.relative_to(path.parent).as_posix(): hashlib.sha256(module.read_bytes()).hexdigest()
        for module in modules
    }
