"""Multi-token prediction in any layout: the gradients and the training of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import differences, full_tensors

from .trials import CP, EP, PP, TP, VPP, assert_same, assert_trained_alike, outcomes

PLAIN = {**DENSE, "model.num_layers": 4, "model.mtp_num_layers": 2}
TIED = {**PLAIN, "model.share_embeddings_and_output_weights": True}
EXPERTS = {**MOE, "model.mtp_num_layers": 1, "model.moe_aux_loss_coeff": 0.0}
WITHOUT_SP = {"parallel.tensor_model_parallel_size": 2}
SPREAD = {"ddp.use_distributed_optimizer": True}


def needing(plugins: tuple[str, ...], *values: object, id: str) -> Any:
    """A case with plugins, which go where their folder is removed."""
    marks = pytest.mark.needs_plugins(*plugins) if plugins else ()
    return pytest.param(*values, plugins, id=id, marks=marks)


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("values", "layout", "world_size", "plugins"),
    [
        needing((), PLAIN, TP, 2, id="tp"),
        needing((), TIED, WITHOUT_SP, 2, id="tied tp without sp"),
        needing((), PLAIN, PP, 2, id="pp"),
        needing((), TIED, VPP, 2, id="tied vpp"),
        needing((), TIED, {**PP, **TP}, 4, id="tied pp tp"),
        needing(("ring-attention",), PLAIN, {**PP, **CP}, 4, id="pp cp ring"),
        needing(("ulysses",), PLAIN, CP, 2, id="ulysses"),
        needing((), EXPERTS, EP, 2, id="ep"),
        needing((), EXPERTS, {**EP, **PP}, 4, id="ep pp"),
    ],
)
def test_mtp_has_the_gradients_of_one_rank(
    gloo_pool: GlooPool,
    values: Mapping[str, Any],
    layout: Mapping[str, Any],
    world_size: int,
    plugins: tuple[str, ...],
) -> None:
    whole = outcomes(gloo_pool, values, 1)
    assert_same(outcomes(gloo_pool, {**values, **layout}, world_size, plugins), whole)


@pytest.mark.needs_plugins("eod-reset", "ring-attention")
def test_packed_documents_keep_their_tokens_over_context_parallel_ranks(
    gloo_pool: GlooPool,
) -> None:
    packed = {**PLAIN, "plugins.eod-reset.document_length": 6}
    whole = outcomes(gloo_pool, packed, 1, ("eod-reset",))
    assert_same(outcomes(gloo_pool, {**packed, **CP}, 2, ("eod-reset", "ring-attention")), whole)
    found = [full_tensors(each).tensors for each in (whole, outcomes(gloo_pool, PLAIN, 1))]
    assert len(list(differences(*found, 1e-3))) == len(found[0])


@pytest.mark.exhaustive(by=lambda values: ["tied"] if values is TIED else [])
@pytest.mark.parametrize("values", [PLAIN, TIED], ids=["untied", "tied"])
def test_both_copies_of_the_embedding_train_alike(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    """The first and the last stage each hold one; four ranks, so that the optimizer is spread."""
    whole = outcomes(gloo_pool, values, 1, steps=3)
    staged = outcomes(gloo_pool, {**values, **PP, **SPREAD}, 4, steps=3)
    assert_trained_alike(staged, whole)


_EMPTY = {"model.num_layers": 6, "plugins.noop-layers.layers": [1, 5]}


@pytest.mark.parametrize(
    ("values", "options", "plugins"),
    [
        needing(("noop-layers",), PLAIN, _EMPTY, id="empty last slot"),
        needing(("swap-attention",), PLAIN, {"plugins.swap-attention.min_bytes": 1}, id="swapped"),
        needing(("gmm",), EXPERTS, {}, id="grouped experts"),
    ],
)
def test_plugins_of_layers_meet_every_depth(
    gloo_pool: GlooPool,
    values: Mapping[str, Any],
    plugins: tuple[str, ...],
    options: Mapping[str, Any],
) -> None:
    whole = outcomes(gloo_pool, values, 1)
    assert_same(outcomes(gloo_pool, {**values, **options}, 1, plugins), whole)


@pytest.mark.needs_plugins("lora")
def test_lora_adapts_the_model_alone_and_learns_from_every_depth(gloo_pool: GlooPool) -> None:
    gradients = []
    for factor in (0.0, 1.0):
        values = {**PLAIN, "model.mtp_loss_scaling_factor": factor}
        found = full_tensors(outcomes(gloo_pool, values, 1, ("lora",))).tensors
        gradients.append({name: t for name, t in found.items() if ".adapter.lora_B" in name})
    without, learned = gradients
    assert len(learned) == 4 * 7
    assert all(name.startswith("decoder.layers.") for name in learned)
    assert len(list(differences(learned, without, 1e-3))) == len(learned)
