"""Logits and every gradient against transformers, on weights that transformers wrote.

What becomes of which tensor is written out here by hand; nothing of the engine is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from ascend_run.plugin_api.testing.pool import GlooPool
from tests.support.loaded_model import largest_difference, run_loaded_model

TOLERANCE = 1e-5
VOCAB, LAYERS, HEADS, GROUPS, WIDTH = 53, 2, 4, 2, 8


def random_mixtral(**changes: Any) -> MixtralForCausalLM:
    """Weights far from initial ones: norms of different values, logits of a size that matters.

    Without the auxiliary loss, which is Megatron's own in our runs.
    """
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HEADS * WIDTH,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=64,
        initializer_range=0.2,
        router_aux_loss_coef=0.0,
        **changes,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def run_reference(
    model: MixtralForCausalLM, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def in_our_layout(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by our names; in memory transformers stacks its experts as we do."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for layer in range(LAYERS):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        rows = []
        q, k, v = (theirs[f"{at}.self_attn.{part}_proj.weight"].split(WIDTH) for part in "qkv")
        for group in range(GROUPS):
            per_group = HEADS // GROUPS
            rows += [q[group * per_group + head] for head in range(per_group)]
            rows += [k[group], v[group]]
        ours[f"{our}.self_attention.linear_qkv.weight"] = torch.cat(rows)
        ours[f"{our}.self_attention.linear_proj.weight"] = theirs[f"{at}.self_attn.o_proj.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        ours[f"{our}.mlp.router.weight"] = theirs[f"{at}.mlp.gate.weight"]
        ours[f"{our}.mlp.experts.fc1"] = theirs[f"{at}.mlp.experts.gate_up_proj"]
        ours[f"{our}.mlp.experts.fc2"] = theirs[f"{at}.mlp.experts.down_proj"]
    return ours


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize(("experts", "chosen"), [(4, 2), (6, 3), (2, 2)])
def test_logits_and_every_gradient_are_those_of_transformers(
    experts: int,
    chosen: int,
    batch: tuple[Tensor, Tensor],
    tmp_path: Path,
    gloo_pool: GlooPool,
) -> None:
    reference = random_mixtral(num_local_experts=experts, num_experts_per_tok=chosen)
    reference.save_pretrained(tmp_path)
    logits, loss, gradients = run_reference(reference, *batch)
    assert logits.abs().max() > 1
    (ours,) = gloo_pool.run(run_loaded_model, 1, "mixtral", str(tmp_path), *batch)
    assert largest_difference(ours.logits_BSV, logits) < TOLERANCE
    assert largest_difference(ours.loss, loss) < TOLERANCE
    expected = in_our_layout(gradients)
    assert ours.gradients.keys() == expected.keys()
    for name, want in expected.items():
        got = ours.gradients[name]
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert not got[VOCAB:].any(), "rows that pad the vocabulary get no gradient"
            got = got[:VOCAB]
        assert largest_difference(got, want) < TOLERANCE, name


def test_two_expert_parallel_ranks_load_their_experts_of_the_same_model(
    batch: tuple[Tensor, Tensor], tmp_path: Path, gloo_pool: GlooPool
) -> None:
    """Both ranks see the same batch, so an expert gets the gradients of both: twice one's."""
    reference = random_mixtral(num_local_experts=4)
    reference.save_pretrained(tmp_path)
    logits, loss, gradients = run_reference(reference, *batch)
    ranks = gloo_pool.run(
        run_loaded_model,
        2,
        "mixtral",
        str(tmp_path),
        *batch,
        ["parallel.expert_model_parallel_size=2"],
    )
    expected = in_our_layout(gradients)
    for rank in ranks:
        assert largest_difference(rank.logits_BSV, logits) < TOLERANCE
        assert largest_difference(rank.loss, loss) < TOLERANCE
    for layer in range(LAYERS):
        for name in ("fc1", "fc2"):
            key = f"decoder.layers.{layer}.mlp.experts.{name}"
            both = torch.cat([rank.gradients[key] for rank in ranks])
            assert largest_difference(both, 2 * expected[key]) < TOLERANCE, key
