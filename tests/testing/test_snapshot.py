"""Which settings of a process count as left changed by a run."""

from __future__ import annotations

import os

import pytest

from ascend_run.testing.conformance.snapshot import Attributes, changed_settings, replaced

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


def test_what_torch_counts_as_it_compiles_is_no_replacement() -> None:
    """A function of the same module is."""

    def mark(num: int) -> None: ...

    counted = {"op_count": 3, "reset_frame_count": len}
    before = Attributes({"torch._dynamo.utils": counted}, {})
    after = Attributes({"torch._dynamo.utils": {**counted, "op_count": 5}}, {})
    assert replaced(before, after) == set()
    patched = Attributes({"torch._dynamo.utils": {**counted, "reset_frame_count": mark}}, {})
    assert replaced(before, patched) == {"torch._dynamo.utils.reset_frame_count"}
    elsewhere = {"torch.nn.functional": {"op_count": 3}}, {"torch.nn.functional": {"op_count": 5}}
    one, other = (Attributes(held, {}) for held in elsewhere)
    assert replaced(one, other) == {"torch.nn.functional.op_count"}
