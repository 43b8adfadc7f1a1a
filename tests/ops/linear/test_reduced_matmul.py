"""All-reduced matmuls against the unsharded formula."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.linear.reduced_matmul import mm_all_reduce_add_rms_norm, split_rows
from ascend_run.testing.pool import GlooPool

from . import reduced_matmul_jobs as jobs


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("kind", ["wide", "int8", "channel", "group"])
def test_product_residual_and_norm_are_the_unsharded_ones(
    gloo_pool: GlooPool, kind: str, in_place: bool
) -> None:
    for differences in gloo_pool.run(jobs.add_rms_norm, 2, kind, in_place):
        assert max(differences) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("split_item", range(4))
def test_groups_are_the_unsharded_ones(
    gloo_pool: GlooPool, split_item: int, with_bias: bool
) -> None:
    assert max(gloo_pool.run(jobs.grouped, 2, split_item, with_bias)) < 1e-12


def test_lists_that_do_not_fit_and_gradients_are_refused() -> None:
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match="split_item=1 with 2 row tensors and 2 matrices"):
        split_rows([x, x], 2, [4, 8], 1)
    with pytest.raises(ValueError, match="split_item=3 needs a group_list"):
        split_rows([x], 2, None, 3)
    with pytest.raises(ValueError, match="split_item=0 takes no group_list"):
        split_rows([x, x], 2, [4, 8], 0)
    with pytest.raises(RuntimeError, match="mm_all_reduce_add_rms_norm has no backward"):
        mm_all_reduce_add_rms_norm(x.requires_grad_(), x, x, x, None)  # type: ignore[arg-type]
