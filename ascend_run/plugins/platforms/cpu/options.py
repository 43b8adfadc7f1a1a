"""Options of the CPU platform, and its environment variables. No torch."""

from __future__ import annotations

from typing import Final

import attrs

BF16_MATMUL_DTYPE: Final = "ASCEND_RUN_BF16_MATMUL_DTYPE"
"""Environment variable that overrides the timing of both bfloat16 options' ``auto`` in this process
and its children, as for a test session."""
FP32_MATMUL_LIBRARY: Final = "ASCEND_RUN_FP32_MATMUL_LIBRARY"
"""The same for ``fp32_matmul_library``."""
DTYPES: Final = ("bf16", "fp32")
LIBRARIES: Final = ("torch", "onednn")
VARIABLES: Final = {BF16_MATMUL_DTYPE: DTYPES, FP32_MATMUL_LIBRARY: LIBRARIES}
"""Environment variable -> its values."""


@attrs.frozen(kw_only=True)
class CpuOptions:
    """Options, set by ``plugins.cpu.<field>=<value>``."""

    bf16_matmul_dtype: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", *DTYPES))
    )
    """Dtype in which bfloat16 matmuls are computed; inputs and results stay bfloat16, accumulation
    is float32. ``auto`` selects the faster one, timed once per processor. Set it if runs on several
    machines must be bitwise equal."""
    bf16_attention_dtype: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", *DTYPES))
    )
    """Dtype in which the backward of bfloat16 attention is computed, with the same values and
    meaning."""
    keep_freed_memory: bool = True
    """Keep freed memory for the next step. If false, blocks of 128 KiB or more go back to the
    system as soon as they are freed: resident memory is what is allocated; steps take longer."""
    fp32_matmul_library: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", *LIBRARIES))
    )
    """Library of float32 matmuls: ``torch`` (the BLAS behind ``torch.mm``) or ``onednn``. ``auto``
    selects the faster one in the same way."""
