"""Write the reference of the plugin API: docs/api/*.md, and the same text for help().

python -m scripts.api_reference            # writes the pages
python -m scripts.api_reference --check    # exits with 1 if a page is out of date

The text is that of the docstrings, read from the sources with griffe: every hook in the order of
the calls with its callers, every record with its fields, every error. The first page shows three
whole plugins, which are those that ``ascend-run new-plugin`` writes.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.tools.new_plugin.names import Names
from ascend_run.tools.new_plugin.rendering import package_files
from scripts.api_names import PAGES, Page
from scripts.api_text import Sources, described, prose, wrapped
from scripts.hook_callers import callers

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs/api"
PACKAGED: Final = ROOT / "ascend_run/reference"
MODULE: Final = "ascend_run.reference"
EXAMPLES: Final = (
    ("A family that is not a Llama", "my_family", "family", "family"),
    ("An optimizer", "my-optimizer", "feature", "optimizer"),
    ("An attention wrapper", "my-attention", "feature", "attention"),
)
"""Heading, name, kind and seam of the plugins on the first page."""
FIRST: Final = """# The plugin API

Three whole plugins, then every name. Each plugin is what `ascend-run new-plugin` writes, with
tests of its effect: replace its feature by yours. [Writing a plugin](../plugin-authors.md) is the
guide. In Python, `help("{module}")` says how to read these pages.

"""
HOOKS: Final = """# Hooks

Every hook of the API, numbered in the order in which a run reaches them; those of layers are called
for each layer. *Called by* names the functions of ascend-run that do. An implementation takes any
subset of the arguments. [Hooks](../hooks.md) lists the plugins that implement each.
"""
OF_A_PAGE: Final = '''"""The page ``{name}`` of the reference, which ``help()`` shows."""

from . import page

__doc__ = page("{name}")
'''


def pages() -> dict[str, str]:
    """Return file name -> text of every page."""
    sources = Sources(ROOT)
    found = {"README.md": _first_page(sources), "hooks.md": _hooks(sources)}
    return found | {f"{page.name}.md": _names(page, sources) for page in PAGES}


def _first_page(sources: Sources) -> str:
    lines = [FIRST.format(module=MODULE)]
    for title, name, kind, seam in EXAMPLES:
        lines.append(f"## {title}\n\n    ascend-run new-plugin {name} --seam {seam}\n\n")
        for path, text in package_files(Names.of(name, kind, seam)).items():
            if path.is_relative_to("src") and path.suffix == ".py":
                lines.append(f"`{path}`:\n\n```python\n{text}```\n\n")
    lines.append("## Every name\n\n| page | names |\n| --- | --- |\n")
    hooks = ", ".join(f"`{name}`" for name in hook_points())
    lines.append(f"| [hooks](hooks.md) | {hooks} |\n")
    for page in PAGES:
        names = ", ".join(f"`{name}`" for name in listed_names(page))
        lines.append(f"| [{page.name}]({page.name}.md) | {names} |\n")
    return "".join(lines)


def listed_names(page: Page) -> Iterator[str]:
    """Yield the names of a page; one that several modules have, with its module's."""
    counts = Counter(name for names in page.names.values() for name in names)
    for module, names in page.names.items():
        for name in names:
            yield name if counts[name] == 1 else f"{module.rpartition('.')[2]}.{name}"


def _hooks(sources: Sources) -> str:
    called_by = callers(ROOT / "ascend_run")
    docstring = sources.module("ascend_run.plugin_api.hookspecs").docstring
    assert docstring is not None
    # When hooks are called, and the arguments that many share.
    *_, when, shared = inspect.cleandoc(docstring.value).split("\n\n")
    lines = [HOOKS, f"\n{prose(when)}\n{prose(shared)}"]
    for number, (name, point) in enumerate(hook_points().items(), 1):
        facts = [f"{point.kind}", f"part: {point.point}"]
        facts += [f"claim: `{point.claim}`"] if point.claim else []
        facts += [f"wraps the value of `{point.wraps}`"] if point.wraps else []
        facts += ["torch-free: also called before torch is imported"] if point.torch_free else []
        by = ", ".join(f"`{caller}`" for caller in called_by[name])
        hook = sources.find("ascend_run.plugin_api.hookspecs", name)
        lines.append(
            f"\n## {number}. `{name}`\n\n{wrapped('; '.join(facts) + f'. Called by {by}.')}\n"
        )
        lines.append(described(hook))
    return "".join(lines)


def _names(page: Page, sources: Sources) -> str:
    lines = [f"# {page.title}\n\n{page.intro}\n"]
    for module, names in page.names.items():
        lines.append(f"\n## From `{module}`\n")
        for name in names:
            lines.append(f"\n### `{name}`\n{described(sources.resolve(module, name))}")
    return "".join(lines)


def modules() -> Iterator[tuple[Path, str]]:
    """Yield path and text of the modules whose docstring ``help()`` shows."""
    names = ("hooks", *(page.name for page in PAGES))
    for name in names:
        yield PACKAGED / f"{name}.py", OF_A_PAGE.format(name=name)


def files() -> Mapping[Path, str]:
    """Return every generated file."""
    found = dict(modules())
    for name, text in pages().items():
        found |= {DOCS / name: text, PACKAGED / name: text}
    return found


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page is outdated.")
def command(check: bool) -> None:
    """Write the reference of the plugin API."""
    for path, text in files().items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            shown = path.relative_to(ROOT)
            click.echo(f"{shown} is out of date; run python -m scripts.api_reference", err=True)
            sys.exit(1)


if __name__ == "__main__":
    command()
