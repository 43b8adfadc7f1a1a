"""A page with a generated part between two markers: write it, or check that it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import click


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with the text between its markers.

    Raises:
        ValueError: The page has no markers.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"expected {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def write_or_check(path: Path, new: str, module: str, *, check: bool) -> None:
    """Write a page; with ``check``, exit with 1 if it is outdated, and name who writes it."""
    if not check:
        path.write_text(new, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != new:
        click.echo(f"{path.name} is out of date; run python -m {module}", err=True)
        sys.exit(1)
