"""Packages with one plugin each, and their installation for the length of a block."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

from ascend_run.tools.new_plugin.names import Names
from ascend_run.tools.new_plugin.rendering import package_files

README: Final = "README.md"
MANIFEST: Final = "manifest.toml"
_RIGHT: Final = Path(__file__).parent / "right"


@attrs.frozen
class Package:
    """One plugin."""

    names: Names
    files: Mapping[str, str]
    """File in the package -> its text; the README is the distribution's."""


def templates() -> Mapping[str, Package]:
    """Return what ``new-plugin`` writes of each kind, by the plugin's name."""
    kinds = ("feature", "task", "family", "platform")
    found = (_written(Names.of(f"fresh-{kind}", kind)) for kind in kinds)
    return {package.names.name: package for package in found}


def others() -> Mapping[str, Package]:
    """Return right packages of kinds without a template, by the plugin's name."""
    kinds = {"seed_oss": "family"}
    found = {}
    for folder in sorted(path.parent for path in _RIGHT.glob(f"*/{MANIFEST}")):
        family = kinds.get(folder.name)
        name = folder.name if family else folder.name.replace("_", "-")
        files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.*")}
        found[name] = Package(Names.of(name, family or "feature"), files)
    return found


def right_packages() -> Mapping[str, Package]:
    """Return every right package, by the plugin's name."""
    return {**templates(), **others()}


def _written(names: Names) -> Package:
    texts = {str(path): text for path, text in package_files(names).items()}
    source = f"src/{names.module}/"
    files = {
        path.removeprefix(source): text for path, text in texts.items() if path.startswith(source)
    }
    return Package(names, {**files, README: texts[README]})


@contextmanager
def installed(package: Package, module: str) -> Iterator[None]:
    """Install a package as a wheel would be, for this process and the ranks of the pool.

    Args:
        module: Its import name, which must be a new one: ranks keep what they have imported.
    """
    names = attrs.evolve(package.names, module=module)
    folder = Path(tempfile.mkdtemp(prefix="ascend-run-wrong-"))
    for path, text in package.files.items():
        (folder / module / path).parent.mkdir(parents=True, exist_ok=True)
        if path != README:
            (folder / module / path).write_text(text, encoding="utf-8")
    _write_metadata(folder, names, package.files[README])
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            del sys.modules[name]
        shutil.rmtree(folder)


def _write_metadata(folder: Path, names: Names, readme: str) -> None:
    info = folder / f"{names.distribution.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {names.distribution}\nVersion: 0.1.0\n"
    (info / "METADATA").write_text(f"{head}\n{readme}", encoding="utf-8")
    points = {
        names.group: f"{names.module}:{names.class_name}",
        "ascend_run.manifests": f"{names.module}:{MANIFEST}",
    }
    lines = (f"[{group}]\n{names.name} = {value}\n" for group, value in points.items())
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
