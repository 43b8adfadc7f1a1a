"""The frame of a page: one file that needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files

from .markup import Markup, data_block, element


def document(
    *,
    title: str,
    brand: str,
    top: Markup,
    sections: Iterable[Markup | None],
    foot: Markup,
    data: object,
    scripts: Sequence[str],
    styles: Sequence[str] = ("page.css",),
) -> str:
    """Return a complete page as text.

    Args:
        data: JSON for the scripts.
        scripts: Assets to concatenate to one script, in this order; likewise ``styles``.
    """
    style = "\n".join(map(_asset, styles))
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, scripts)) + "\n})();\n"
    head = [
        element("meta", charset="utf-8"),
        element(
            "meta", http_equiv="Content-Security-Policy", content=_content_policy(style, script)
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    ]
    body = [
        element("header", element("p", brand, class_="brand"), top),
        element("main", *sections),
        element("footer", foot),
        data_block("report-data", data),
        element("script", Markup(script)),
    ]
    page = element("html", element("head", *head), element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def section(identifier: str, title: str, *children: Markup | None) -> Markup:
    """Return a section with a heading."""
    heading = element("h2", title, id=f"{identifier}-title")
    return element(
        "section", heading, *children, id=identifier, aria_labelledby=f"{identifier}-title"
    )


def _content_policy(style: str, script: str) -> str:
    """Content security policy: only the page's own script and style, and no requests.

    They are identified by hashes, so that unescaped text can never run as a script.
    """
    return f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("ascend_run.tools.pages.assets") / name).read_text(encoding="utf-8")
