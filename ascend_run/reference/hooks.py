"""The page ``hooks`` of the reference, which ``help()`` shows."""

from . import page

__doc__ = page("hooks")
