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
from transformers import LlamaConfig, LlamaForCausalLM

from ascend_run.plugin_api.testing.pool import GlooPool
from tests.support.loaded_model import largest_difference, run_loaded_model

TOLERANCE = 1e-5
VOCAB, LAYERS, HEADS = 53, 2, 4

SHAPES = {
    "grouped": {"num_key_value_heads": 2},
    "one-group": {"num_key_value_heads": 1},
    "every-head-its-own": {"num_key_value_heads": 4},
    "wide-heads": {"num_key_value_heads": 2, "head_dim": 12},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "another-base": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "rms_norm_eps": 1e-2,
    },
}


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """Weights far from initial ones: norms of different values, logits of a size that matters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        initializer_range=0.2,
        **changes,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def run_reference(
    model: LlamaForCausalLM, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def in_our_layout(theirs: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Gradients by our names, put together head by head."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for layer in range(LAYERS):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        rows = []
        for group in range(config.num_key_value_heads):
            per_group = HEADS // config.num_key_value_heads
            q, k, v = (
                theirs[f"{at}.self_attn.{part}_proj.weight"].split(config.head_dim)
                for part in "qkv"
            )
            rows += [q[group * per_group + head] for head in range(per_group)]
            rows += [k[group], v[group]]
        ours[f"{our}.self_attention.linear_qkv.weight"] = torch.cat(rows)
        ours[f"{our}.self_attention.linear_proj.weight"] = theirs[f"{at}.self_attn.o_proj.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        ours[f"{our}.mlp.linear_fc1.weight"] = torch.cat(
            [theirs[f"{at}.mlp.gate_proj.weight"], theirs[f"{at}.mlp.up_proj.weight"]]
        )
        ours[f"{our}.mlp.linear_fc2.weight"] = theirs[f"{at}.mlp.down_proj.weight"]
    return ours


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_are_those_of_transformers(
    shape: str, batch: tuple[Tensor, Tensor], tmp_path: Path, gloo_pool: GlooPool
) -> None:
    reference = random_llama(**SHAPES[shape])
    reference.save_pretrained(tmp_path)
    logits, loss, gradients = run_reference(reference, *batch)
    assert logits.abs().max() > 1
    (ours,) = gloo_pool.run(run_loaded_model, 1, "llama", str(tmp_path), *batch)
    assert largest_difference(ours.logits_BSV, logits) < TOLERANCE
    assert largest_difference(ours.loss, loss) < TOLERANCE
    expected = in_our_layout(gradients, reference.config)
    assert ours.gradients.keys() == expected.keys()
    for name, want in expected.items():
        got = ours.gradients[name]
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert not got[VOCAB:].any(), "rows that pad the vocabulary get no gradient"
            got = got[:VOCAB]
        assert largest_difference(got, want) < TOLERANCE, name


def test_two_tensor_parallel_ranks_load_their_parts_of_the_same_model(
    batch: tuple[Tensor, Tensor], tmp_path: Path, gloo_pool: GlooPool
) -> None:
    reference = random_llama(num_key_value_heads=2)
    reference.save_pretrained(tmp_path)
    _, loss, gradients = run_reference(reference, *batch)
    ranks = gloo_pool.run(
        run_loaded_model,
        2,
        "llama",
        str(tmp_path),
        *batch,
        ["parallel.tensor_model_parallel_size=2", "model.make_vocab_size_divisible_by=2"],
    )
    expected = in_our_layout(gradients, reference.config)
    for rank in ranks:
        assert largest_difference(rank.loss, loss) < TOLERANCE
    for layer in range(LAYERS):
        qkv = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
        both = torch.cat([rank.gradients[qkv] for rank in ranks])
        assert largest_difference(both, expected[qkv]) < TOLERANCE
        fc1 = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        halves = [rank.gradients[fc1].chunk(2) for rank in ranks]
        both = torch.cat([half[part] for part in range(2) for half in halves])
        assert largest_difference(both, expected[fc1]) < TOLERANCE
