"""Shards to full tensors, and what counts as a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ascend_run.testing.runtime import RankOutcome, Shard
from ascend_run.testing.tensors import differences, full_tensors, relative_error

WHOLE = torch.arange(12, dtype=torch.float64).reshape(4, 3) + 1


def outcome(
    *rows: tuple[int, int], tensor: torch.Tensor = WHOLE, missing: Sequence[str] = ()
) -> RankOutcome:
    """A rank that holds some ranges of rows of the parameter ``w``, and others without gradient."""
    shards = [
        Shard(name="w", tensor=tensor[begin:end], offset=(begin, 0), global_shape=(4, 3))
        for begin, end in rows
    ]
    nothing = [Shard(name=n, tensor=None, offset=(0,), global_shape=(3,)) for n in missing]
    return RankOutcome(losses=(1.0,), grad_norms=(), shards=(*shards, *nothing))


def test_shards_of_several_ranks_make_the_full_tensor() -> None:
    whole = full_tensors([outcome((0, 1), (3, 4)), outcome((1, 3))])
    assert whole.problems() == []
    assert torch.equal(whole.tensors["w"], WHOLE)


def test_equal_replicas_are_accepted_and_different_ones_named() -> None:
    assert full_tensors([outcome((0, 4)), outcome((0, 4))]).problems() == []
    other = WHOLE.clone()
    other[2, 1] += 0.5
    whole = full_tensors([outcome((0, 1)), outcome((0, 4)), outcome((2, 4), tensor=other)])
    (problem,) = whole.problems(1e-10)
    assert problem == "rank 2: its replica of w differs by 4.17e-02 from rank 1's"
    assert whole.problems(0.05) == []


class Elsewhere(torch.Tensor):
    """A tensor of another device than the host: until it is copied, torch refuses both together."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if len({type(x) for x in tensors}) > 1 and function is not torch.Tensor.copy_:
            raise RuntimeError("Expected all tensors to be on the same device")
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is not torch.Tensor.cpu:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(torch.Tensor)


def test_replicas_of_another_device_are_compared_on_the_host() -> None:
    ranks = [outcome((0, 4), tensor=WHOLE.as_subclass(Elsewhere)) for _ in range(2)]
    whole = full_tensors(ranks)
    assert whole.problems() == []
    assert type(whole.tensors["w"]) is torch.Tensor
    assert torch.equal(whole.tensors["w"], WHOLE)


def test_a_hole_is_named_with_its_size() -> None:
    (problem,) = full_tensors([outcome((0, 1)), outcome((2, 4))]).problems()
    assert problem == "w: no rank holds 3 of its elements"


def test_a_missing_gradient_is_named_with_its_rank() -> None:
    (problem,) = full_tensors([outcome((0, 4)), outcome((0, 4), missing=["b"])]).problems()
    assert problem == "rank 1: b got no gradient"


@pytest.mark.parametrize(
    ("result", "expected", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-300], [0.0, 0.0], math.inf),
        ([math.nan, 2.0], [1.0, 2.0], math.inf),
        ([math.nan], [math.nan], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([math.inf], [1.0], math.inf),
    ],
)
def test_errors_are_relative_to_the_largest_value_and_strict_about_nan(
    result: list[float], expected: list[float], apart: float
) -> None:
    got, want = (torch.tensor(values, dtype=torch.float64) for values in (result, expected))
    assert relative_error(got, want) == apart


def test_every_difference_is_a_sentence_with_the_parameters_name() -> None:
    got = {"same": WHOLE, "off": WHOLE * (1 + 1e-6), "new": WHOLE}
    want = {"same": WHOLE, "off": WHOLE, "lost": WHOLE}
    sentences = list(differences(got, want, 1e-10))
    assert len(sentences) == 3
    assert sentences[0] == "lost is missing"
    assert sentences[1].startswith("new does not exist")
    assert sentences[2].startswith("off has max error 1.00e-06")
    assert list(differences(got, want, 1e-5))[2:] == []
