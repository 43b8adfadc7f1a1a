"""What waits for parameters calls the hooks that gather them, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ascend_run.ops.late_parameters import await_parameters


@pytest.mark.parametrize(
    ("module", "calls"),
    [("megatron.core.distributed.distributed_data_parallel", 2), ("a_profiler", 0)],
)
def test_only_hooks_of_data_parallelism_are_called(module: str, calls: int) -> None:
    called = []

    def hook(part: nn.Module, args: tuple[Any, ...]) -> None:
        called.append(part)

    hook.__module__ = module
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for linear in model:
        linear.register_forward_pre_hook(hook)
    await_parameters(model)
    assert called == [*model][:calls]


def test_a_hook_with_keywords_is_not_called() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda part, args, kwargs: None, with_kwargs=True)
    await_parameters(model)
