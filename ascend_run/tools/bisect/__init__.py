"""``ascend-run bisect``: find what makes two runs part, or a run diverge.

``search`` chooses the sets of choices to compare, ``comparing`` compares plugins of one run with
the run without them, ``run_comparing`` a mixture of two runs with the first; ``journal`` keeps the
results of an interrupted search, ``text`` is what is shown.
"""

from typing import Final

SUMMARY: Final = "Find what makes two runs part, or which plugins make a run diverge."
