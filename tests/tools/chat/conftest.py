"""Megatron, imported before the first test module asks for it."""

from __future__ import annotations

import warnings

# Megatron and what it imports warn of what they deprecate or miss, once, when first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt  # noqa: F401
