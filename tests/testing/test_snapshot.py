"""Which settings of a process count as left changed by a run."""

from __future__ import annotations

import os

import pytest

from ascend_run.testing.conformance.snapshot import changed_settings

FRAMES = "frames that torch.compile has seen"
VARIABLE = "the environment variable "


@pytest.mark.parametrize(
    ("name", "compiled", "plain"),
    [
        (f"{VARIABLE}TRITON_CACHE_DIR", True, False),
        (f"{VARIABLE}TORCHINDUCTOR_CACHE_DIR", True, False),
        (f"the open file {os.devnull}", True, False),
        ("the threads", True, False),
        (f"{VARIABLE}HOME", True, True),
        ("the open file /tmp/any", True, True),
        (f"{VARIABLE}TRITON_CACHE_DIR", False, True),
    ],
)
def test_what_torch_compile_keeps_counts_only_if_it_compiled_nothing(
    name: str, compiled: bool, plain: bool
) -> None:
    """Where it compiles for a GPU, it sets variables of Triton and keeps the null device open."""
    before: dict[str, object] = {FRAMES: 3, name: 1}
    after: dict[str, object] = {FRAMES: 3 + compiled, name: 2}
    reported = [f"{name} (was 1, is 2)"] if plain else []
    assert [*changed_settings(before, before, after)] == reported
