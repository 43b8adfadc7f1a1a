"""The page ``errors`` of the reference, which ``help()`` shows."""

from . import page

__doc__ = page("errors")
