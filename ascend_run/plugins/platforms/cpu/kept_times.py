"""Cache of times in the user's cache folder, shared between runs. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Times:
    """Seconds of the same work done in two ways."""

    usual: float
    other: float


def cache_folder() -> Path | None:
    """Return ``ascend-run`` in the user's cache folder; None if the user has no home folder."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification ignores relative paths
        return Path(named) / "ascend-run"
    try:
        return Path.home() / ".cache" / "ascend-run"
    except RuntimeError:
        return None


def kept_times(folder: Path, key: Mapping[str, str]) -> Times | None:
    """Read the times of a key; return None if they are missing or corrupt."""
    try:
        record = json.loads(_file(folder, key).read_text(encoding="utf-8"))
        body = {name: record[name] for name in ("key", "seconds")}
        if record["checksum"] != _digest(body) or body["key"] != key:
            return None
        times = Times(**{name: float(value) for name, value in body["seconds"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return times if all(0 < t < math.inf for t in attrs.astuple(times)) else None


def keep_times(folder: Path, key: Mapping[str, str], times: Times) -> None:
    """Write the times of a key to a file of its own, atomically.

    Raises:
        OSError: The file cannot be written.
    """
    path = _file(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"key": dict(key), "seconds": attrs.asdict(times)}
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        beside.write_text(json.dumps({**body, "checksum": _digest(body)}), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _file(folder: Path, key: Mapping[str, str]) -> Path:
    return folder / f"times-{_digest(dict(key))[:16]}.json"


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
