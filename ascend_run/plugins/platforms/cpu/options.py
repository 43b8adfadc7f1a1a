"""Options of the CPU platform, and its environment variable. No torch."""

from __future__ import annotations

from typing import Final

import attrs

BF16_MATMUL_DTYPE: Final = "ASCEND_RUN_BF16_MATMUL_DTYPE"
"""Environment variable that overrides the timing of both options' ``auto`` in this process and its
children, as for a test session."""


@attrs.frozen(kw_only=True)
class CpuOptions:
    """Options, set by ``plugins.cpu.<field>=<value>``."""

    bf16_matmul_dtype: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", "bf16", "fp32"))
    )
    """Dtype in which bfloat16 matmuls are computed; inputs and results stay bfloat16, accumulation
    is float32. ``auto`` selects the faster one, timed once per processor. Set it if runs on several
    machines must be bitwise equal."""
    bf16_attention_dtype: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", "bf16", "fp32"))
    )
    """Dtype in which the backward of bfloat16 attention is computed, with the same values and
    meaning."""
