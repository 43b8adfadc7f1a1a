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
from transformers import GPT2Config, GPT2LMHeadModel

from ascend_run.plugin_api.testing.pool import GlooPool
from tests.support.loaded_model import Outcome, largest_difference, run_loaded_model

TOLERANCE = 1e-5
VOCAB, LAYERS, HEADS, WIDTH = 53, 2, 4, 8

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "narrow-feed-forward": {"n_inner": 40},
    "another-epsilon": {"layer_norm_epsilon": 1e-2},
}


def random_gpt2(**changes: Any) -> GPT2LMHeadModel:
    """Weights far from initial ones: no bias is zero, no norm one, logits of a size that counts."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=HEADS * WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        **changes,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    return model


def run_reference(
    model: GPT2LMHeadModel, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def by_head(fused: Tensor) -> Tensor:
    """Rows q, k, v, each by head -> for each head its q, its k, its v."""
    return fused.unflatten(0, (3, HEADS, WIDTH)).transpose(0, 1).flatten(0, 2)


def in_our_layout(theirs: dict[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """Gradients by our names."""
    ours = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": theirs["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": theirs["transformer.ln_f.bias"],
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for layer in range(LAYERS):
        at, our = f"transformer.h.{layer}", f"decoder.layers.{layer}"
        for name, their_name in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
            for part in ("weight", "bias"):
                ours[f"{our}.{name}.{part}"] = theirs[f"{at}.{their_name}.{part}"]
        qkv = f"{our}.self_attention.linear_qkv"
        ours[f"{qkv}.weight"] = by_head(theirs[f"{at}.attn.c_attn.weight"].t())
        ours[f"{qkv}.bias"] = by_head(theirs[f"{at}.attn.c_attn.bias"])
        for name, their_name in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            ours[f"{our}.{name}.weight"] = theirs[f"{at}.{their_name}.weight"].t()
            ours[f"{our}.{name}.bias"] = theirs[f"{at}.{their_name}.bias"]
    return ours


def assert_gradients(ours: Outcome, expected: dict[str, Tensor]) -> None:
    assert ours.gradients.keys() == expected.keys()
    for name, want in expected.items():
        got = ours.gradients[name]
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert not got[VOCAB:].any(), "rows that pad the vocabulary get no gradient"
            got = got[:VOCAB]
        assert largest_difference(got, want) < TOLERANCE, name


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_are_those_of_transformers(
    shape: str, batch: tuple[Tensor, Tensor], tmp_path: Path, gloo_pool: GlooPool
) -> None:
    reference = random_gpt2(**SHAPES[shape])
    reference.save_pretrained(tmp_path)
    logits, loss, gradients = run_reference(reference, *batch)
    assert logits.abs().max() > 1
    (ours,) = gloo_pool.run(run_loaded_model, 1, "gpt2", str(tmp_path), *batch)
    assert largest_difference(ours.logits_BSV, logits) < TOLERANCE
    assert largest_difference(ours.loss, loss) < TOLERANCE
    assert_gradients(ours, in_our_layout(gradients, reference.config))


def test_two_tensor_parallel_ranks_load_their_parts_of_the_same_model(
    batch: tuple[Tensor, Tensor], tmp_path: Path, gloo_pool: GlooPool
) -> None:
    """Biases are cut like the rows that they belong to, or held whole where columns are cut."""
    reference = random_gpt2()
    reference.save_pretrained(tmp_path)
    _, loss, gradients = run_reference(reference, *batch)
    ranks = gloo_pool.run(
        run_loaded_model,
        2,
        "gpt2",
        str(tmp_path),
        *batch,
        ["parallel.tensor_model_parallel_size=2", "model.make_vocab_size_divisible_by=2"],
    )
    expected = in_our_layout(gradients, reference.config)
    for rank in ranks:
        assert largest_difference(rank.loss, loss) < TOLERANCE
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}"
        for name, axis in (
            ("self_attention.linear_qkv.weight", 0),
            ("self_attention.linear_qkv.bias", 0),
            ("self_attention.linear_proj.weight", 1),
            ("mlp.linear_fc1.weight", 0),
            ("mlp.linear_fc1.bias", 0),
            ("mlp.linear_fc2.weight", 1),
        ):
            both = torch.cat([rank.gradients[f"{at}.{name}"] for rank in ranks], axis)
            assert largest_difference(both, expected[f"{at}.{name}"]) < TOLERANCE, name
        for name in ("self_attention.linear_proj.bias", "mlp.linear_fc2.bias"):
            for rank in ranks:
                got = rank.gradients[f"{at}.{name}"]
                assert largest_difference(got, expected[f"{at}.{name}"]) < TOLERANCE, name
