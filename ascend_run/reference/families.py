"""The page ``families`` of the reference, which ``help()`` shows."""

from . import page

__doc__ = page("families")
