"""Fake distributions: a folder with metadata and modules, put on ``sys.path``."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

PLUGIN = """
    import attrs
    from ascend_run.plugin_api import Claim, HookKind, Manifest, Support, hookimpl

    @attrs.frozen(kw_only=True)
    class Options:
        size: int = 1
        \"\"\"How many. Unit: rows.\"\"\"

    class Plugin:
        manifest = Manifest({manifest})
        config_class = Options

        def __init__(self, config):
            self.config = config
"""


def plugin_source(name: str, manifest: str = "") -> str:
    """Return a module with a class ``Plugin``; ``manifest`` holds further arguments of its
    Manifest."""
    arguments = f"name={name!r}, summary='a plugin named {name}', {manifest}"
    return dedent(PLUGIN).format(manifest=arguments)


def make_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    record: bool = False,
    editable: bool = False,
) -> Path:
    """Write a distribution as an installer does, and return the folder to put on ``sys.path``.

    Args:
        entry_points: Group -> name -> ``module:attribute``.
        modules: File path -> source.
        record: Write a RECORD with the hash of every file.
        editable: Mark it as an editable install.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, source in (modules or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(dedent(source))
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, found in entry_points.items()
        for line in (f"[{group}]", *(f"{n} = {value}" for n, value in found.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    if editable:
        origin = {"url": folder.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(origin))
    if record:
        _write_record(folder, info)
    return folder


def _write_record(folder: Path, info: Path) -> None:
    rows = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
            hashed = f"sha256={digest.decode().rstrip('=')}"
            rows.append(f"{path.relative_to(folder).as_posix()},{hashed},{path.stat().st_size}")
    rows.append(f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
