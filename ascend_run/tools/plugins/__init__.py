"""``ascend-run plugins``: list the installed plugins, or show one of them."""

from typing import Final

SUMMARY: Final = "List the plugins, or show one."
