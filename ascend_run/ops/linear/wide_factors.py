"""Working memory of bfloat16 matmuls that run in float32. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ascend_run.types.cost import Phase, PipelineStage, WorkingMemory

_STEPS: Final[Mapping[str, str]] = {
    "self_attention.linear_qkv": "self_attention.qkv",
    "self_attention.linear_proj": "self_attention.proj",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
"""Weight -> the step of backward that computes its gradient."""
_WIDE: Final = 4


def wide_factors(rank: PipelineStage, hidden: int) -> Iterator[WorkingMemory]:
    """Yield the float32 copies of each linear's input and of its output's gradient."""
    widths = {
        parameter.key: parameter.numel / hidden
        for parameter in rank.parameters
        if parameter.trained and parameter.key in _STEPS
    }
    for key, width in widths.items():
        nbytes = rank.tokens * (hidden + width) * _WIDE
        yield WorkingMemory(
            part=_STEPS[key], name="wide factors", nbytes=nbytes, phase=Phase.BACKWARD
        )
