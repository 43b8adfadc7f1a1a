"""The reference of the plugin API, in the package.

``help("ascend_run.reference.hooks")`` shows every hook in the order of the calls, with
its arguments and its callers; ``records`` what hooks take and return, field by field; ``errors``,
``families``, ``testing`` and ``platforms`` the rest. The same pages are in ``docs/api``;
``python -m scripts.api_reference`` writes them.
"""

from importlib.resources import files


def page(name: str) -> str:
    """Return the text of a page, in Markdown."""
    return files(__name__).joinpath(f"{name}.md").read_text(encoding="utf-8")
