"""Megatron is imported here, once: its import makes torch warn of torch's own deprecated parts, and
a warning is an error in a test."""

from __future__ import annotations

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.core.optimizer")
