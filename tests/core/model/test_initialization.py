"""Initial weights: a function of the seed and the name, whatever the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome
from ascend_run.testing.tensors import full_tensors
from tests.support.small_runs import initial_weights, standing_model

SHARED_EXPERT = {**MOE, "model.moe_shared_expert_intermediate_size": 16}
WIDE = {**DENSE, "model.normalization": "LayerNorm", "model.add_bias_linear": True}
TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP = {"parallel.expert_model_parallel_size": 2}
ETP = {"parallel.expert_tensor_parallel_size": 2}
PP = {"parallel.pipeline_model_parallel_size": 2}
VPP = {**PP, "parallel.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4}
TIED = {"model.share_embeddings_and_output_weights": True}


def whole(outcomes: list[RankOutcome]) -> Mapping[str, Tensor]:
    gathered = full_tensors(outcomes)
    assert not gathered.problems()
    return gathered.tensors


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("values", "layout", "world_size"),
    [
        (DENSE, TP, 2),
        (DENSE, {**TP, "parallel.tensor_model_parallel_size": 4}, 4),
        ({**DENSE, "model.share_embeddings_and_output_weights": True}, TP, 2),
        (WIDE, TP, 2),
        (SHARED_EXPERT, EP, 2),
        (SHARED_EXPERT, TP, 2),
        (MOE, {**TP, **EP}, 4),
        (DENSE, PP, 2),
        ({**DENSE, **TIED}, {**PP, **TP}, 4),
        ({**MOE, **TIED, "model.num_layers": 4}, VPP, 2),
        (MOE, ETP, 2),
        (MOE, {**ETP, **EP, **TP}, 4),
    ],
    ids=[
        "dense tp",
        "shared key-value heads",
        "tied tp",
        "biases tp",
        "shared expert ep",
        "shared expert tp",
        "moe tp ep",
        "pp",
        "tied pp tp",
        "tied moe vpp",
        "etp",
        "etp ep tp",
    ],
)
def test_every_layout_starts_from_the_bits_of_one_rank(
    gloo_pool: GlooPool, values: Mapping[str, Any], layout: Mapping[str, Any], world_size: int
) -> None:
    alone = whole(gloo_pool.run(initial_weights, 1, values))
    several = whole(gloo_pool.run(initial_weights, world_size, {**values, **layout}))
    assert several.keys() == alone.keys()
    assert all(torch.equal(several[name], alone[name]) for name in alone)


def drawn(key: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """What the documentation promises: a normal draw from a hash of the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def test_each_weight_is_the_draw_of_its_own_name() -> None:
    std, seed = MOE["model.init_method_std"], MOE["run.seed"]
    residual = std / math.sqrt(2 * 2)
    values = {**MOE, "model.embedding_init_method_std": 0.5}
    with standing_model(values, torch.float32) as model:
        state = dict(model.named_parameters())
        for key, shape, wanted in (
            ("decoder.layers.1.self_attention.linear_proj.weight", (32, 32), residual),
            ("decoder.layers.0.self_attention.linear_qkv.weight", (48, 32), std),
            ("decoder.layers.1.mlp.router.weight", (4, 32), std),
        ):
            assert torch.equal(state[key], drawn(key, shape, wanted, seed)), key
        name = "decoder.layers.1.mlp.experts.fc2"
        assert torch.equal(state[name][3], drawn(f"{name}/3", (32, 48), residual, seed))
        for name, wanted in (("embedding.word_embeddings", 0.5), ("output_layer", std)):
            table = state[f"{name}.weight"]
            assert torch.equal(table[:90], drawn(f"{name}.weight", (90, 32), wanted, seed))
            assert table.shape[0] == 96
            assert not table[90:].any()
        assert torch.equal(state["decoder.final_layernorm.weight"], torch.ones(32))


def test_another_seed_gives_other_weights_and_biases_start_at_zero() -> None:
    with standing_model(WIDE, torch.float32) as model:
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
    with standing_model({**WIDE, "run.seed": 18}, torch.float32) as model:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any(), name
            elif "norm" in name:
                assert torch.equal(parameter, torch.ones_like(parameter)), name
            else:
                assert not torch.equal(parameter, first[name]), name


@pytest.mark.parametrize("values", [DENSE, MOE], ids=["dense", "moe"])
def test_an_untrained_model_knows_nothing(values: Mapping[str, Any]) -> None:
    """Its loss is that of the even guess over the true vocabulary, without the padding."""
    with standing_model({**values, "model.init_method_std": 0.02}) as model:
        tokens = torch.randint(90, (4, 16), generator=torch.Generator().manual_seed(0))
        loss = model(tokens, labels=tokens.roll(1), loss_mask=torch.ones(4, 16))
        assert float(loss) / tokens.numel() == pytest.approx(math.log(90), rel=0.03)
