"""Buckets of parameters, and steps of an optimizer for one of them."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.optimizer_buckets import buckets, stepping_some


@pytest.mark.parametrize(
    ("numels", "expected"),
    [
        ([], []),
        ([2, 1, 1, 3], [range(2), range(2, 3), range(3, 4)]),
        ([5, 1, 2], [range(1), range(1, 3)]),
        ([0, 0, 0], [range(3)]),
    ],
    ids=["none", "full", "a larger one", "no elements"],
)
def test_a_bucket_has_as_many_parameters_as_fit_or_one(
    numels: list[int], expected: list[range]
) -> None:
    assert [*buckets(numels, 3)] == expected


def test_parameters_left_out_of_a_step_come_back_after_an_error() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    groups = [{"params": parameters[:2], "lr": 1.0}, {"params": parameters[2:], "lr": 10.0}]
    optimizer = torch.optim.SGD(groups)

    def step_and_fail() -> None:
        with stepping_some(optimizer) as step:
            step([parameters[0], parameters[3]])
            step([parameters[0]])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        step_and_fail()
    assert [p.item() for p in parameters] == [-2.0, 0.0, 0.0, -10.0]
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in parameters[:2]],
        [id(p) for p in parameters[2:]],
    ]
