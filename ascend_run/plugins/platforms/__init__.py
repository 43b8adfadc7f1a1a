"""Platforms: a device with its operators.

Shared by them: patches for optional packages that Megatron uses without checking.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from ascend_run.plugin_api import Patch

CHECKED_VERSIONS: Final = "==0.16.1"
"""Versions of megatron-core; the same as in our package metadata."""


def absent_package_patches() -> tuple[Patch, ...]:
    """Return patches for runs without Transformer Engine and flash-attention."""
    from packaging.version import Version

    absent = "compared with a version even if the package is not installed"
    undefined = "used but undefined if Transformer Engine is not installed"
    replacements = (
        ("megatron.core.utils:_te_version", Version("0"), absent),
        ("megatron.core.utils:_fa_version", Version("0"), absent),
        ("megatron.core.transformer.moe.moe_utils:te_general_gemm", None, undefined),
    )
    return tuple(
        Patch(
            target=target,
            replacement=replacement,
            why=why,
            versions=CHECKED_VERSIONS,
            source_hash=None,
            until="Megatron checks first whether the package is installed",
            group="absent packages",
            missing_ok=why == undefined,
        )
        for target, replacement, why in replacements
    )


def transformer_engine_patches() -> tuple[Patch, ...]:
    """Return ``absent_package_patches`` if Transformer Engine is not installed, else none."""
    return () if importlib.util.find_spec("transformer_engine") else absent_package_patches()
