"""Write the static manifests of the built-in plugins: TOML files, and their lines in setup.cfg.

python -m scripts.static_manifests            # writes them; then install the package again
python -m scripts.static_manifests --check    # exits with 1 if one is out of date

A plugin that is a package has ``manifest.toml`` in it; one that is a module has a file of the
module's name beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click
import tomli_w

from ascend_run.registry.discovery import Candidate, discover
from ascend_run.registry.kinds import MANIFESTS, Plugin
from ascend_run.registry.static_manifest import StaticManifest

ROOT: Final = Path(__file__).parent.parent
SETUP: Final = "setup.cfg"
_BEGIN: Final = f"{MANIFESTS} =\n"


def static_manifests(setup: str) -> dict[str, str]:
    """Return path -> text of each file, relative to the root.

    Args:
        setup: The text of setup.cfg, whose group of static manifests is replaced.
    """
    catalogue = discover()
    ours = [name for name, candidate in catalogue.items() if candidate.first_party]
    plugins = {name: candidate_class(catalogue[name]) for name in ours}
    canonical = {name: p for name, p in plugins.items() if name == p.manifest.name}
    places = {name: _place(catalogue[name]) for name in canonical}
    files = {_path(places[name]): _toml(name, plugin) for name, plugin in canonical.items()}
    return {**files, SETUP: _with_lines(setup, places)}


def candidate_class(candidate: Candidate) -> Plugin:
    """Import a plugin without validating it against its static manifest."""
    plugin: Plugin = candidate.entry_point.load()
    return plugin


def _place(candidate: Candidate) -> str:
    """``package:file``."""
    module = candidate.entry_point.module
    package, _, name = module.rpartition(".")
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    return f"{module}:manifest.toml" if is_package else f"{package}:{name}.toml"


def _path(place: str) -> str:
    package, _, file = place.partition(":")
    return f"{package.replace('.', '/')}/{file}"


def _toml(name: str, plugin: Plugin) -> str:
    return tomli_w.dumps({name: StaticManifest.of(plugin)._asdict()})


def _with_lines(setup: str, places: Mapping[str, str]) -> str:
    """Replace the lines of the group, up to the next empty line."""
    before, begin, rest = setup.partition(_BEGIN)
    if not begin:
        raise ValueError(f"{SETUP} has no line '{_BEGIN.rstrip()}'")
    _, end, after = rest.partition("\n\n")
    lines = "\n".join(f"    {name} = {place}" for name, place in sorted(places.items()))
    return f"{before}{begin}{lines}{end}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is outdated.")
def command(check: bool) -> None:
    """Write the static manifests of the built-in plugins."""
    setup = (ROOT / SETUP).read_text(encoding="utf-8")
    files = static_manifests(setup)
    old = {path: (ROOT / path).read_text("utf-8") for path in files if (ROOT / path).is_file()}
    outdated = [path for path, text in files.items() if old.get(path) != text]
    if check:
        for path in outdated:
            click.echo(f"{path} is out of date; run python -m scripts.static_manifests", err=True)
        sys.exit(int(bool(outdated)))
    for path in outdated:
        (ROOT / path).write_text(files[path], encoding="utf-8")


if __name__ == "__main__":
    command()
