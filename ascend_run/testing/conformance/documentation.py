"""Check that a plugin has a documentation page."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .subject import Subject


def has_a_page(subject: Subject) -> Iterator[str]:
    """Check that a page names the plugin and each of its options.

    The page is the first of these that exists: ``docs/plugins/NAME.md``,
    ``docs/plugins/GROUP/NAME.md`` or ``docs/NAME.md`` in the source tree that the plugin is
    imported from (if ``docs/plugins`` exists, the page must be in it); ``NAME.md`` or ``README.md``
    in the plugin's package; ``README.md`` in the source tree; the description (README) in its
    distribution's metadata.
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
    """The text of the page, and its location."""
    name = subject.manifest.name
    file = getattr(sys.modules.get(subject.plugin.__module__), "__file__", None)
    if file is not None:
        folder = Path(file).parent
        packaged = [folder / f"{name}.md"]
        if (folder / "__init__.py").is_file():
            packaged.append(folder / "README.md")
        for above in () if _is_installed(folder) else folder.parents:
            docs = above / "docs"
            if not (above / "pyproject.toml").is_file():
                continue
            pages = (*sorted((docs / "plugins").rglob(f"{name}.md")), docs / f"{name}.md")
            for page in pages:
                if page.is_file():
                    return page.read_text(encoding="utf-8"), str(page)
            if (docs / "plugins").is_dir():
                return "", ""
            # The metadata of an editable installation has the README as it was when installed.
            packaged.append(above / "README.md")
            break
        for page in packaged:
            if page.is_file():
                return page.read_text(encoding="utf-8"), str(page)
    metadata = subject.distribution.metadata.json
    return str(metadata.get("description", "")), f"the description of {subject.facts.distribution}"


def _is_installed(folder: Path) -> bool:
    """Whether a package is in site-packages; an environment may be inside of a source tree."""
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return any(folder.is_relative_to(place) for place in places)
