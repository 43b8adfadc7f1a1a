"""``ascend-run new-plugin``: write a package outside the tree that installs and passes the kit."""

from typing import Final

SUMMARY: Final = "Create a package with a new plugin."
