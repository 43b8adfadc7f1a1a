"""The comparison accepts a plugin that is right, and finds every one that is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ascend_run.testing.offering import offered
from ascend_run.testing.parity import Parity, ParityError

from . import planted

PARAMETER = "decoder.layers.0.self_attention.linear_proj.weight"


@pytest.fixture(autouse=True, scope="module")
def _planted_plugins() -> Iterator[None]:
    with offered(*planted.ALL):
        yield


@pytest.mark.exhaustive(by=lambda size: [])
@pytest.mark.parametrize("size", [2, 4])
def test_a_right_plugin_is_accepted_and_its_collectives_are_counted(
    parity: Parity, size: int
) -> None:
    outcomes = parity("gathers-everything", layout={"cp": size})
    assert len(outcomes) == size
    # 2 layers, 4 micro-batches: q, k and v forward, and they and dout backward.
    assert all(outcome.collectives["allgather_"] == 2 * 4 * 7 for outcome in outcomes)


def test_a_gradient_off_by_a_millionth_is_found_and_named(parity: Parity) -> None:
    with pytest.raises(ParityError) as caught:
        parity("scales-a-gradient")
    gradients = [p for p in caught.value.problems if p.startswith("gradient")]
    assert len(gradients) == 1
    assert PARAMETER in gradients[0]
    assert "1.00e-06" in gradients[0]


def test_it_is_found_in_a_layout_too_and_the_layout_is_named(parity: Parity) -> None:
    with pytest.raises(ParityError) as caught:
        parity("scales-a-gradient", beside=["gathers-everything"], layout={"cp": 2})
    assert "scales-a-gradient beside gathers-everything (dense, cp=2)" in str(caught.value)
    assert PARAMETER in caught.value.problems[0]


def test_a_gradient_of_zeros_is_found(parity: Parity) -> None:
    with pytest.raises(ParityError, match=r"max error 1\.00e\+00"):
        parity("zeroes-a-gradient")


def test_a_parameter_that_does_not_train_is_found(parity: Parity) -> None:
    with pytest.raises(ParityError) as caught:
        parity("forgets-a-parameter")
    assert any(f"{PARAMETER} is missing" in problem for problem in caught.value.problems)


def test_a_bitwise_plugin_is_checked_bitwise(parity: Parity) -> None:
    with pytest.raises(ParityError) as caught:
        parity("rounds-once")
    gradients = [p for p in caught.value.problems if p.startswith("gradient")]
    assert len(gradients) == 1
    assert "bitwise" in gradients[0]
    assert PARAMETER in gradients[0]


def test_a_wrong_step_is_found_though_every_gradient_is_right(parity: Parity) -> None:
    with pytest.raises(ParityError) as caught:
        parity("learns-twice-as-fast")
    assert all(problem.startswith("after 5 steps") for problem in caught.value.problems)


@pytest.mark.exhaustive(by=lambda size: [])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_in_the_wrong_order_are_found(parity: Parity, size: int) -> None:
    with pytest.raises(ParityError, match="linear_qkv"):
        parity("gathers-in-the-wrong-order", layout={"cp": size})


def test_a_plugin_that_changes_the_model_alone_has_no_parity(parity: Parity) -> None:
    with pytest.raises(ValueError, match="changes the model"):
        parity("changes-the-model")


def test_a_plugin_that_changes_the_model_is_compared_with_itself(
    parity: Parity,
) -> None:
    parity("changes-the-model", layout={"dp": 2})
    parity(("changes-the-model", "gathers-everything"), layout={"cp": 2})
    parity("gathers-everything", beside=("changes-the-model",), layout={"cp": 2})
    with pytest.raises(ParityError, match="against one rank with changes-the-model alone"):
        parity(("scales-a-gradient", "changes-the-model"))
    with pytest.raises(ParityError, match="bitwise"):
        parity(("rounds-once", "changes-the-model"))


def test_a_plain_run_is_made_once_for_many_comparisons(parity: Parity) -> None:
    parity("gathers-everything", layout={"cp": 2})
    made = len(parity._made)
    parity("gathers-everything", layout={"cp": 2})
    assert len(parity._made) == made
