"""Imports Megatron's datasets before the first test module does."""

from __future__ import annotations

import warnings

# Megatron and its dependencies warn of deprecations and missing packages when first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.gpt_dataset  # noqa: F401
