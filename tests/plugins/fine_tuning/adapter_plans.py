"""Values that the suites of adapters plan and run with, and what a plan expects of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ascend_run.testing.models import DENSE
from tests.support.costs import planned

TENSORS: Final = {"parallel.tensor_model_parallel_size": 2}
SEQUENCE: Final = {**TENSORS, "parallel.sequence_parallel": True}
LONGER: Final = {"data.seq_length": 64}
"""More tokens than any linear has inputs."""
RECOMPUTED: Final = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}


def exposed_bytes(plugins: Sequence[str], values: Mapping[str, Any]) -> float:
    """Return what one of two tensor-parallel ranks sends while nothing is computed."""
    _, (cost,) = planned({**DENSE, **LONGER, **values}, plugins, 2)
    return sum(m.sent_bytes for m in cost.communication if m.group == "tp" and not m.overlapped)
