"""Build HTML; all text is escaped unless it is Markup."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any, Final

_VOID: Final = frozenset({"input", "meta", "br"})


class Markup(str):
    """HTML that needs no escaping."""

    __slots__ = ()


Child = str | None
"""Text, which is escaped, or Markup; None is left out."""


def element(tag: str, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """Build an element.

    Args:
        attributes: ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; True is an
            attribute without a value; None and False are left out.
    """
    opened = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{opened}>")
    return Markup(f"<{tag}{opened}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Concatenate children."""
    return Markup("".join(escape(child) for child in children if child is not None))


def escape(text: str) -> Markup:
    """Escape text; Markup is returned unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(text))


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], **attributes: Any) -> Markup:
    """Build a table with a header row; the first cell of each row is its header."""
    body = [
        element("tr", *(_cell(cell, first=i == 0) for i, cell in enumerate(row))) for row in rows
    ]
    titles = element("tr", *(element("th", title, scope="col") for title in head))
    content = element("table", element("thead", titles), element("tbody", *body), **attributes)
    # Focusable, so that it can be scrolled with the keyboard if it is wider than the page.
    return element("div", content, class_="scroll", tabindex=0)


def details(summary: Child, *children: Child, **attributes: Any) -> Markup:
    """Build a collapsible section."""
    return element("details", element("summary", summary), *children, **attributes)


def data_block(identifier: str, value: object) -> Markup:
    """Embed JSON for the page's script; it cannot contain HTML tags."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", Markup(text), type="application/json", id=identifier)


def _cell(child: Child, *, first: bool) -> Markup:
    return element("th", child, scope="row") if first else element("td", child)


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
