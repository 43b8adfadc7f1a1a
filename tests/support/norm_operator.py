"""What counts the norms that a run computes."""

from __future__ import annotations

import os
from typing import Final

from ascend_run.testing.runtime import PLATFORM_VARIABLE

NORM: Final = {"cpu": "rsqrt_", "cuda": "_fused_rms_norm"}[os.environ.get(PLATFORM_VARIABLE, "cpu")]
"""An operator of the platform's norm, called once for each."""
