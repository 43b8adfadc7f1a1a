"""Mutations of the NPU's implementations, one at a time: their tests detect every one.

A mutation changes the code around a call, where the call itself is one that torch_npu accepts: a
missing gradient, a group list of the other kind, rows at wrong positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch

from ascend_run.testing.pool import GlooPool
from benchmarks.campaigns.seeded_bugs.mutation import mutated

from . import (
    forms_jobs,
    linear_jobs,
    test_forms,
    test_linear,
    test_platform_ops,
    test_swapped_memory,
)

FORMS: Final = "ascend_run.plugins.platforms.npu.forms"
HALF, BROAD = torch.float16, torch.float32


@attrs.frozen
class Mistake:
    """One change of one function's source."""

    target: str
    old: str
    new: str
    proof: Callable[[], Any]
    """The test that must fail."""


def norm(name: str) -> Callable[[], None]:
    return lambda: test_forms.test_dropout_add_norm(name, (), True)


def groups() -> None:
    test_forms.test_grouped_products((3, 0, 4, 2), True)


def experts(*, on_device: bool) -> None:
    test_platform_ops.test_experts_by_grouped_products_follow_the_formula((3, 0, 1, 2), on_device)


def feed_forward() -> None:
    test_forms.test_feed_forwards(None, "relu")


def adamw() -> None:
    test_swapped_memory.test_steps_of_adamw_are_torchs(torch.float64, 1e-12)


def copies() -> None:
    test_swapped_memory.test_copies_keep_every_bit(BROAD)


MISTAKES: dict[str, Mistake] = {
    "layer norm: the gradient of the sum is left out": Mistake(
        f"{FORMS}.norm:_AddLayerNorm.backward", "dx = dx + dsummed", "pass", norm("layer_norm")
    ),
    "rms norm: the residual gets the gradient of the sum alone": Mistake(
        f"{FORMS}.norm:_AddRmsNorm.backward",
        "return dx, dx,",
        "return dx, dsummed,",
        norm("rms_norm"),
    ),
    "rms norm: without the bias": Mistake(
        f"{FORMS}.norm:dropout_add_rms_norm",
        "out if bias_H is None else out + bias_H",
        "out if bias_H is None else out + 0 * bias_H",
        norm("rms_norm"),
    ),
    "groups: running totals for the rows of each": Mistake(
        f"{FORMS}.groups:_sizes", "groups_X.diff(prepend=groups_X.new_zeros(1))", "groups_X", groups
    ),
    "groups: an empty group is not cleared": Mistake(
        f"{FORMS}.groups:_outer", "(_sizes(groups_X, per_group) == 0)", "(groups_X == -1)", groups
    ),
    "groups of the table: an empty one is not cleared": Mistake(
        "ascend_run.plugins.platforms.npu.platform_ops:NpuGroups.outer",
        "if count == 0:",
        "if count == -1:",
        lambda: experts(on_device=False),
    ),
    "groups of the table, counted on the device: an empty one is not cleared": Mistake(
        "ascend_run.plugins.platforms.npu.platform_ops:NpuGroups.outer",
        "(self.counts == 0)",
        "(self.counts == -1)",
        lambda: experts(on_device=True),
    ),
    "rotary: the gradient turns the same way": Mistake(
        "ascend_run.plugins.platforms.npu.platform_ops:_Rotary.backward",
        "cos, -sin",
        "cos, sin",
        lambda: test_platform_ops.test_rotary_follows_the_formula(False, 8),
    ),
    "permutation: rows of zeros before the others": Mistake(
        f"{FORMS}.moe:_pad_rows",
        "(0, 0, 0, missing)",
        "(0, 0, missing, 0)",
        lambda: test_forms.test_token_permutation(6),
    ),
    "permutation: the gradient of the weights the other way": Mistake(
        f"{FORMS}.moe:_Unpermute.backward",
        "else dprobs",
        "else -dprobs",
        lambda: test_forms.test_token_permutation(None),
    ),
    "ring update: a query that sees nothing keeps a number": Mistake(
        f"{FORMS}.ring:ring_attention_update",
        "largest.masked_fill(nothing, -torch.inf)",
        "largest",
        lambda: test_forms.test_ring_update("SBH"),
    ),
    "quantised products: scales of tokens that nobody gave are halves": Mistake(
        f"{FORMS}.quantised:quant_grouped_matmul",
        "torch.ones(x_TK.shape[0], device=x_TK.device)",
        "torch.full((x_TK.shape[0],), 0.5)",
        lambda: test_forms.test_quantised_products(HALF, "relu"),
    ),
    "feed-forward: the second offset is left out": Mistake(
        f"{FORMS}.quantised:weight_quantised_ffn",
        "_or_zeros(antiquant_offset2, antiquant_scale2)",
        "_or_zeros(None, antiquant_scale2)",
        feed_forward,
    ),
    "feed-forward: the offset the other way": Mistake(
        f"{FORMS}.quantised:quantised_ffn", "offset.float()", "-offset.float()", feed_forward
    ),
    "gradient of a weight: fused where it is not added in float32": Mistake(
        f"{FORMS}.linear:matmul_add_fp32",
        "a_TN.dtype in HALF and",
        "",
        lambda: test_linear.test_a_gradient_is_added_by_the_grouped_product_with_one_group(
            BROAD, BROAD, 6, False
        ),
    ),
    "AdamW: the decay of the first moment, a step later": Mistake(
        f"{FORMS}.swapped_memory:SwappedMemory.adamw_step_",
        "beta1 ** (step - 1)",
        "beta1**step",
        adamw,
    ),
    "AdamW: the number of steps is not counted": Mistake(
        f"{FORMS}.swapped_memory:SwappedMemory.adamw_step_",
        "torch._foreach_add_(steps, 1)",
        "pass",
        adamw,
    ),
    "copies: what was there is not overwritten first": Mistake(
        f"{FORMS}.swapped_memory:_copy", "target.fill_(-0.0)", "pass", copies
    ),
    "copies: a positive zero hides the sign of zeros": Mistake(
        f"{FORMS}.swapped_memory:_copy", "target.fill_(-0.0)", "target.zero_()", copies
    ),
    "copies: half of what was there stays": Mistake(
        f"{FORMS}.swapped_memory:_copy", "beta1=0.0", "beta1=0.5", copies
    ),
}
ON_RANKS: dict[str, tuple[Mistake, Callable[[float, set[str]], bool]]] = {
    "product, sum and norm: the two answers in each other's place": (
        Mistake(
            f"{FORMS}.reduced:mm_all_reduce_add_rms_norm",
            "return y, normalised",
            "return normalised, y",
            lambda: forms_jobs.add_rms_norm("wide", BROAD, False),
        ),
        lambda apart, seen: apart > 1e-3,
    ),
    "groups summed over ranks: without their biases": (
        Mistake(
            f"{FORMS}.reduced:grouped_matmul_all_reduce",
            "(products, biases, split_item, group)",
            "(products, None, split_item, group)",
            lambda: forms_jobs.grouped(0),
        ),
        lambda apart, seen: apart > 1e-3,
    ),
    "product with a gather: narrower than the operator takes": (
        Mistake(
            f"{FORMS}.linear:_takes",
            "matrix_KN.shape[0] in INNER and ",
            "",
            lambda: linear_jobs.product("all_gather_matmul", 255, 6, False),
        ),
        lambda apart, seen: seen == {"refused"},
    ),
}
"""For implementations that communicate: their job, and the check of its result (error, calls)."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_test_of_the_forms_finds_it(name: str) -> None:
    mistake = MISTAKES[name]
    with mutated(mistake.target, mistake.old, mistake.new), pytest.raises(AssertionError):
        mistake.proof()


def test_nothing_is_found_where_nothing_is_planted() -> None:
    for proof in {id(m.proof): m.proof for m in MISTAKES.values()}.values():
        proof()


def with_mistake(name: str) -> tuple[float, set[str]]:
    """Run a job of the pool with a mutation; an error raised by a reference counts as infinite
    error."""
    mistake, _ = ON_RANKS[name]
    with mutated(mistake.target, mistake.old, mistake.new):
        try:
            return mistake.proof()
        except AssertionError:
            return math.inf, {"refused"}


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_test_on_ranks_finds_it(gloo_pool: GlooPool, name: str) -> None:
    _, is_found = ON_RANKS[name]
    for apart, seen in gloo_pool.run(with_mistake, 2, name):
        assert is_found(apart, seen)


def test_the_page_gives_their_number() -> None:
    page = (Path(__file__).parents[4] / "docs/npu-proof.md").read_text(encoding="utf-8")
    assert f"plants {len(MISTAKES) + len(ON_RANKS)} mistakes in the forms" in " ".join(page.split())
