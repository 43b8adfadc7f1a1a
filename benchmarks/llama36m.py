"""The model of the end-to-end comparison, and its weights and data in every system's names.

A 36.1M-parameter Llama: 6 layers, hidden 512, feed-forward 1408, 8 heads, vocabulary 16384, on
2 sequences of 1024 tokens; AdamW, fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

LAYERS: Final = 6
HIDDEN: Final = 512
FFN: Final = 1408
HEADS: Final = 8
VOCAB: Final = 16384
SEQ_LENGTH: Final = 1024
MICRO_BATCH: Final = 2
LEARNING_RATE: Final = 3e-4
DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S], the same for every system."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def weights() -> dict[str, Tensor]:
    """Every parameter, float32, under Megatron's names (local layer spec, no biases)."""
    generator = torch.Generator().manual_seed(1234)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)

    state = {"embedding.word_embeddings.weight": normal(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}"
        state |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attention.linear_qkv.weight": normal(3 * HIDDEN, HIDDEN),
            f"{prefix}.self_attention.linear_proj.weight": normal(HIDDEN, HIDDEN),
            f"{prefix}.pre_mlp_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.mlp.linear_fc1.weight": normal(2 * FFN, HIDDEN),
            f"{prefix}.mlp.linear_fc2.weight": normal(HIDDEN, FFN),
        }
    state["decoder.final_layernorm.weight"] = torch.ones(HIDDEN)
    state["output_layer.weight"] = normal(VOCAB, HIDDEN)
    return state


def litgpt_weights() -> dict[str, Tensor]:
    """The same numbers under litgpt's names: q, k and v one after the other, not by head."""
    state = weights()
    renamed = {
        "transformer.wte.weight": state["embedding.word_embeddings.weight"],
        "transformer.ln_f.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(LAYERS):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        by_head = state[f"{ours}.self_attention.linear_qkv.weight"]
        qkv = by_head.view(HEADS, 3, HIDDEN // HEADS, HIDDEN).transpose(0, 1).reshape_as(by_head)
        gate, up = state[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
        renamed |= {
            f"{theirs}.norm_1.weight": state[f"{ours}.input_layernorm.weight"],
            f"{theirs}.attn.qkv.weight": qkv,
            f"{theirs}.attn.proj.weight": state[f"{ours}.self_attention.linear_proj.weight"],
            f"{theirs}.norm_2.weight": state[f"{ours}.pre_mlp_layernorm.weight"],
            f"{theirs}.mlp.fc_1.weight": gate,
            f"{theirs}.mlp.fc_2.weight": up,
            f"{theirs}.mlp.proj.weight": state[f"{ours}.mlp.linear_fc2.weight"],
        }
    return renamed
