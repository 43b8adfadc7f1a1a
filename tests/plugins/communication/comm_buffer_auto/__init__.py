"""Megatron is imported first where its warnings are known."""

import tests.support.probed_runs  # noqa: F401
