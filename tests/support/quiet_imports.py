"""Imports of what warns when it is first imported, before a test module imports it."""

from __future__ import annotations

import importlib
import warnings


def import_quietly(*modules: str) -> None:
    """Import modules without their warnings, which are errors in a test. Megatron and what it
    imports warn of what they deprecate or miss, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
