"""Wrong: listeners, and the state that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_run.plugin_api import TensorShard, hookimpl

from .base import Listens, declared


class IsNeverCalled(Listens):
    """One of its listeners is not marked."""

    manifest = declared("is-never-called")

    def ascend_after_evaluation(self, loss: float) -> None:
        """Nothing."""


class CountsSteps(Listens):
    """Logs how many steps it has seen."""

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def ascend_after_step(self, context: Any) -> None:
        self.count += 1 + context.layout.rank

    @hookimpl
    def ascend_metrics(self) -> Any:
        return {"counts": lambda context: {"steps": self.count}}


class ForgetsItsCount(CountsSteps):
    """Which a resumed run begins at 0."""

    manifest = declared("forgets-its-count")


class TakesAnothersCount(CountsSteps):
    """Saved as if all ranks had the same one."""

    manifest = declared("takes-anothers-count")

    @hookimpl
    def ascend_checkpoint_entries(self, context: Any) -> Any:
        self.is_first = context.layout.rank == 0
        return {"counts": self}

    def state_dict(self) -> Mapping[str, Any]:
        import torch

        count = torch.tensor([self.count])
        shard = TensorShard(
            key="count", tensor=count, global_shape=(1,), offset=(0,), writes=self.is_first
        )
        return {"count": shard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])
