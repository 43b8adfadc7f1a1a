"""The page ``testing`` of the reference, which ``help()`` shows."""

from . import page

__doc__ = page("testing")
