"""Locations of built-in plugins' docs pages."""

from __future__ import annotations

from pathlib import Path

from ascend_run.registry.discovery import Catalogue

DOCS = Path(__file__).parents[2] / "docs/plugins"


def page_of(catalogue: Catalogue, name: str) -> Path:
    """Return the page of a plugin, by its canonical name."""
    return DOCS / catalogue[name].category / f"{name}.md"
