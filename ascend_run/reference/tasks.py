"""The page ``tasks`` of the reference, which ``help()`` shows."""

from . import page

__doc__ = page("tasks")
