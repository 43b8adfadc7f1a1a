"""Where a run's optimizer cannot update what a rank holds. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.core.config.optimizer import named_optimizer_spec
from ascend_run.core.hooks import Hooks
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout


def optimizer_problems(config: RunConfig, layout: Layout, hooks: Hooks) -> Iterator[str]:
    """Yield a message for each option with which a rank would hold only some elements of a
    parameter, unless the optimizer supports that.

    Raises:
        HookError: As ``named_optimizer_spec``.
    """
    name, spec = named_optimizer_spec(config, hooks)
    if spec.element_wise:
        return
    whole = f"'{name}' provides an optimizer that is not element-wise: it needs whole parameters, "
    if config.ddp.use_distributed_optimizer:
        yield (
            f"{whole}but ddp.use_distributed_optimizer=true shards the elements of each over "
            "data-parallel ranks; set it to false"
        )
    if spec.tensor_parallel:
        return
    for axis, size in (("tensor_model", layout.tp), ("expert_tensor", layout.expt_tp)):
        if size > 1:
            yield f"{whole}but parallel.{axis}_parallel_size={size} shards them; use 1"
