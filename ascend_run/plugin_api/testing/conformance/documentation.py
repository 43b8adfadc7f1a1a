"""A page for users: where it is looked for, and what must be on it."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .subject import Subject


def has_a_page(subject: Subject) -> Iterator[str]:
    """A page names the plugin and each of its options.

    The first of these that is there: ``docs/plugins/NAME.md`` or ``docs/NAME.md`` in the source
    tree that the plugin runs from (with the first folder, the page must be in it); ``NAME.md`` or
    ``README.md`` in the plugin's package; the description (README) in its distribution's metadata.
    """
    name = subject.manifest.name
    text, place = _page(subject)
    if not text.strip():
        yield (
            f"there is no page: write docs/plugins/{name}.md in the source tree, {name}.md in the "
            "package, or a README that the distribution's metadata carries (readme = "
            '"README.md" in pyproject.toml)'
        )
        return
    if name not in text:
        yield f"{place} does not name '{name}'"
    for option in subject.facts.options:
        if option.name not in text:
            yield f"{place} does not name the option '{option.name}'"


def _page(subject: Subject) -> tuple[str, str]:
    """The text, and where it is from."""
    name = subject.manifest.name
    file = getattr(sys.modules.get(subject.plugin.__module__), "__file__", None)
    if file is not None:
        folder = Path(file).parent
        for above in () if _is_installed(folder) else folder.parents:
            docs = above / "docs"
            if not (above / "pyproject.toml").is_file():
                continue
            for page in (docs / "plugins" / f"{name}.md", docs / f"{name}.md"):
                if page.is_file():
                    return page.read_text(encoding="utf-8"), str(page)
            if (docs / "plugins").is_dir():
                return "", ""
            break
        packaged = [folder / f"{name}.md"]
        if (folder / "__init__.py").is_file():
            packaged.append(folder / "README.md")
        for page in packaged:
            if page.is_file():
                return page.read_text(encoding="utf-8"), str(page)
    metadata = subject.distribution.metadata.json
    return str(metadata.get("description", "")), f"the description of {subject.facts.distribution}"


def _is_installed(folder: Path) -> bool:
    """Whether a package lies in an environment, which may itself lie in a source tree."""
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return any(folder.is_relative_to(place) for place in places)
