"""What Megatron asks of packages that an accelerator's machine may lack, for platforms to share."""

from __future__ import annotations

import importlib.util
from typing import Final

from .contracts import Patch

CHECKED_VERSIONS: Final = "==0.16.1"
"""Of megatron-core."""


def transformer_engine_patches() -> tuple[Patch, ...]:
    """Patches for ``ascend_patches`` where Transformer Engine is not installed; else none."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return ()
    from packaging.version import Version

    absent = "compared with a version even where the package is not installed"
    undefined = "used without being defined where Transformer Engine is not installed"
    until = "Megatron asks whether the package is there first"
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
            until=until,
        )
        for target, replacement, why in replacements
    )
