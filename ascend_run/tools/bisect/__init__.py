"""``ascend-run bisect``: find the plugins that make a run diverge.

``search`` chooses the sets of plugins to compare, ``comparing`` compares one with the run without
them, ``journal`` keeps the results of an interrupted search, ``text`` is what is shown.
"""

from typing import Final

SUMMARY: Final = "Find the plugins that make a run diverge."
