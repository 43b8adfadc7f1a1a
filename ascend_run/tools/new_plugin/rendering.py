"""Render a new package's files from the templates, which are package data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import attrs
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.version import Version

from ascend_run import __version__
from ascend_run.plugin_api import API_VERSION

from .names import Names

TEMPLATES: Final = Path(__file__).parent / "templates"
COMMON: Final = "common"
"""Folder of the templates for all kinds; another per seam or kind, and ``parts`` to include."""
SUFFIX: Final = ".jinja"


def package_files(names: Names) -> Mapping[PurePosixPath, str]:
    """Return path in the package -> its text.

    ``MODULE``, ``NAME`` and ``SNAKE`` in a template's path are replaced with the plugin's.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,  # Python, TOML and Markdown, from a name of letters, digits and hyphens
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    values = {
        **attrs.asdict(names),
        "requires_api": f">={API_VERSION},<{API_VERSION + 1}",
        "requirement": f"ascend-run{compatible_range(__version__)}",
    }
    files: dict[PurePosixPath, str] = {}
    for template in environment.list_templates(extensions=[SUFFIX.removeprefix(".")]):
        folder, _, place = template.removesuffix(SUFFIX).partition("/")
        if folder in (COMMON, names.template):
            files[_path(place, names)] = environment.get_template(template).render(values)
    return files


def _path(place: str, names: Names) -> PurePosixPath:
    for word, value in (("MODULE", names.module), ("SNAKE", names.snake), ("NAME", names.name)):
        place = place.replace(word, value)
    return PurePosixPath(place)


def compatible_range(version: str) -> str:
    """Return the requirement for releases with the same plugin API; below 1.0, of the same minor
    version."""
    release = Version(version)
    following = f"0.{release.minor + 1}" if release.major == 0 else f"{release.major + 1}"
    return f">={release.base_version},<{following}"
