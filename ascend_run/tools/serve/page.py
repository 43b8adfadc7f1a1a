"""The page at ``/``: one file that talks to the model by the API."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files

from starlette.responses import Response


def page_response(model: str, *, chats: bool, asks_key: bool) -> Response:
    """Return the page.

    Its policy lets its own script and style run, by their hashes, and lets it connect to this
    server alone; no other site may frame it.

    Args:
        chats: Whether the model has a chat template; otherwise the page continues texts.
        asks_key: Whether requests need a key, which the page asks for and does not keep.
    """
    text = (files("ascend_run.tools.serve") / "page.html").read_text("utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        ]
    )
    values = {"model": model, "chats": "yes" if chats else "", "asks_key": "yes" * asks_key}
    for name, value in values.items():
        text = text.replace("{{ " + name + " }}", html.escape(value))
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return Response(text, headers=headers, media_type="text/html")


def _hash(text: str, element: str) -> str:
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
