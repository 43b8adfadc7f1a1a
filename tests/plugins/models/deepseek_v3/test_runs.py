"""DeepSeek-V3 in training: the bias of each expert, in every layout and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import samples
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Runs
from tests.support.latent_models import MODEL
from tests.support.small_runs import Values, standing_rank

BIASED = {
    "model.family": "deepseek_v3",
    "model.num_moe_experts": 8,
    "model.moe_router_topk": 3,
    "model.moe_router_num_groups": 4,
    "model.moe_router_group_topk": 2,
    "model.moe_router_bias_update_rate": 0.03,
    "model.moe_aux_loss_coeff": 0.0,
}
V3 = {**MODEL, **BIASED}
TENSORS = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EXPERTS = {"parallel.expert_model_parallel_size": 2}


def biases_of_steps(values: Values, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's tokens of each expert and the bias after the step. A job for the pool."""
    from ascend_run.core.model.router import Router
    from ascend_run.ops.experts.expert_load import ExpertLoad
    from ascend_run.testing.dry_run import DryRun

    found = []
    with standing_rank(values) as (hooks, context):
        dry_run = DryRun(hooks, context)
        dry_run.build()
        step, batches = dry_run.train_step(), dry_run.batches(samples(values, 4 * steps))
        modules = dry_run.bundle.chunks[0].modules()
        (router,) = (module for module in modules if isinstance(module, Router))
        load = ExpertLoad(router)
        for _ in range(steps):
            dry_run.step(step, batches)
            assert router.expert_bias is not None
            assert router.expert_bias.dtype is torch.float32
            found.append((load.take(), router.expert_bias.clone()))
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, {}), (4, {**TENSORS, **EXPERTS})], ids=["data", "all"]
)
def test_bias_moves_by_the_rate_towards_the_mean_load_of_all_ranks(
    gloo_pool: GlooPool, ranks: int, layout: Values
) -> None:
    found = gloo_pool.run(biases_of_steps, ranks, {**V3, **layout, "train.precision": "bf16"}, 3)
    expected = torch.zeros(8)
    for by_rank in zip(*found, strict=True):
        counts = sum(counts for counts, _ in by_rank).double()
        assert counts.sum() == 4 * 16 * 3
        expected += 0.03 * (counts.mean() - counts).sign().float()
        for _, bias in by_rank:
            torch.testing.assert_close(bias, expected)
    assert expected.abs().max() > 0.05


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "dp": 2, "ep": 2}, {"pp": 2, "cp": 2}],
    ids=["tensors, experts and data", "stages and sequences"],
)
def test_every_layout_computes_what_one_rank_does(parity: Parity, layout: dict[str, int]) -> None:
    plugins = ("ulysses",) if "cp" in layout else ()
    parity(plugins, model="moe", layout=layout, config=V3)


def test_a_run_in_two_halves_is_the_run_in_one(gloo_pool: GlooPool, tmp_path: Path) -> None:
    values = {**V3, **EXPERTS, "train.global_batch_size": 2}
    runs = Runs(gloo_pool, tmp_path, (values, 2, ()))
    runs.assert_the_same_in_two_halves()
