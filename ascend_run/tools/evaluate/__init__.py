"""``ascend-run evaluate``: perplexity of held-out text, and benchmarks, of a stored model."""

from typing import Final

SUMMARY: Final = "Measure perplexity and benchmarks of a stored model."
