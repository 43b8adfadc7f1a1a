"""Logits and every gradient against transformers, on weights saved by transformers.

The mapping of tensors is written out by hand; nothing of the implementation is used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

from ascend_run.testing.pool import GlooPool
from tests.support.against_transformers import (
    TENSOR,
    TENSOR_PARALLEL,
    VOCAB,
    Reference,
    check_loaded_weights,
    check_one_rank,
    check_two_ranks,
)

WIDTHS = {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
NO_LOSS = ["model.moe_aux_loss_coeff=0"]
"""The auxiliary loss is Megatron's own."""


def random_deepseek(**changes: Any) -> DeepseekV2ForCausalLM:
    """Build a model with weights unlike initial ones: norms of different values, logits that
    matter."""
    torch.manual_seed(0)
    given = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "rope_parameters": YARN,
        **WIDTHS,
        **changes,
    }
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**given))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def in_our_layout(theirs: dict[str, Tensor], config: DeepseekV2Config) -> dict[str, Tensor]:
    """Rename its tensors to ours; in memory transformers stacks its experts as we do."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    names = {
        "q_proj": "linear_q_proj",
        "q_a_proj": "linear_q_down_proj",
        "q_a_layernorm": "q_layernorm",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
    }
    for layer in range(config.num_hidden_layers):
        at, our = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for name, own in names.items():
            if f"{at}.self_attn.{name}.weight" in theirs:
                ours[f"{our}.self_attention.{own}.weight"] = theirs[f"{at}.self_attn.{name}.weight"]
        ours[f"{our}.input_layernorm.weight"] = theirs[f"{at}.input_layernorm.weight"]
        ours[f"{our}.pre_mlp_layernorm.weight"] = theirs[f"{at}.post_attention_layernorm.weight"]
        feed_forwards = {f"{at}.mlp": f"{our}.mlp"}
        if layer >= config.first_k_dense_replace:
            feed_forwards = {f"{at}.mlp.shared_experts": f"{our}.mlp.shared_experts"}
            ours[f"{our}.mlp.router.weight"] = theirs[f"{at}.mlp.gate.weight"]
            ours[f"{our}.mlp.experts.fc1"] = theirs[f"{at}.mlp.experts.gate_up_proj"]
            ours[f"{our}.mlp.experts.fc2"] = theirs[f"{at}.mlp.experts.down_proj"]
        for there, here in feed_forwards.items():
            gate, up, down = (theirs[f"{there}.{p}_proj.weight"] for p in ("gate", "up", "down"))
            ours[f"{here}.linear_fc1.weight"] = torch.cat((gate, up))
            ours[f"{here}.linear_fc2.weight"] = down
    return ours


def reference_of(folder: Path, **changes: Any) -> Reference:
    return Reference("deepseek_v2", random_deepseek(**changes), folder, in_our_layout)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    ],
    ids=["yarn", "no latent for queries, positions as they are", "yarn without magnitudes"],
)
def test_logits_and_every_gradient_are_those_of_transformers(
    changes: dict[str, Any], gloo_pool: GlooPool, tmp_path: Path
) -> None:
    check_one_rank(reference_of(tmp_path, **changes), gloo_pool, NO_LOSS)


def test_so_they_are_in_float64(
    gloo_pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For dense layers, with transformers' float32 parts (norms, angles) in float64."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def turned(x: Tensor, angles_SP: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles_SP).flatten(-2)

    def exact_angles(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
        rounded = torch.outer(position_ids[0].double(), self.inv_freq.double())
        angles = torch.outer(position_ids[0].double(), yarn_frequencies())
        assert (rounded - angles).abs().max() < 1e-5
        growth = math.log(YARN["factor"])
        size = (0.1 * YARN["mscale"] * growth + 1) / (0.1 * YARN["mscale_all_dim"] * growth + 1)
        return torch.polar(torch.full_like(angles, size), angles)

    monkeypatch.setattr(modeling.DeepseekV2RMSNorm, "forward", norm)
    monkeypatch.setattr(
        modeling, "apply_rotary_emb", lambda q, k, angles: (turned(q, angles), turned(k, angles))
    )
    monkeypatch.setattr(modeling.DeepseekV2RotaryEmbedding, "forward", exact_angles)
    model = random_deepseek(first_k_dense_replace=2).double()
    reference = Reference("deepseek_v2", model, tmp_path, in_our_layout)
    check_one_rank(reference, gloo_pool, tolerance=1e-10)


def yarn_frequencies() -> Tensor:
    """Return angles at position 1, from arXiv:2309.00071 (section 3.2, NTK-by-parts)."""
    pairs = torch.arange(4, dtype=torch.float64)
    plain = 100.0 ** (-pairs / 4)

    def pair_of(turns: float) -> float:
        return 4 * math.log(8 / (turns * 2 * math.pi)) / math.log(100.0)

    low, high = max(math.floor(pair_of(4.0)), 0), min(math.ceil(pair_of(1.0)), 7)
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain * (1 - stretched) + plain / 4.0 * stretched


def test_two_tensor_parallel_ranks_have_every_gradient_of_the_same_model(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Without sequence parallelism, which experts would require."""
    reference = reference_of(tmp_path, first_k_dense_replace=2)
    overrides = [*TENSOR_PARALLEL, "model.num_moe_experts=none"]
    check_two_ranks(reference, gloo_pool, [*overrides, "model.moe_ffn_hidden_size=none"])


def test_tensor_parallel_ranks_load_the_same_weights(gloo_pool: GlooPool, tmp_path: Path) -> None:
    layout = {**TENSOR, "parallel.expert_tensor_parallel_size": 2}
    check_loaded_weights(reference_of(tmp_path), gloo_pool, 2, layout)
