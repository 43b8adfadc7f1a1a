"""The weights of the comparison under the peers' names."""

from __future__ import annotations

from torch import Tensor

from .llama import Shape, weights


def megatron_weights(shape: Shape) -> dict[str, Tensor]:
    """Return weights with the names of Megatron's local layer spec: experts are modules."""
    state = weights(shape)
    for name in [name for name in state if ".experts." in name]:
        prefix, _, fc = name.rpartition(".")
        for index, matrix in enumerate(state.pop(name)):
            state[f"{prefix}.local_experts.{index}.linear_{fc}.weight"] = matrix
    return state


def litgpt_weights(shape: Shape) -> dict[str, Tensor]:
    """Return weights with litgpt's names: q, k and v are concatenated, not interleaved by head."""
    state = weights(shape)
    renamed = {
        "transformer.wte.weight": state["embedding.word_embeddings.weight"],
        "transformer.ln_f.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        gate, up = state[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
        renamed |= {
            f"{theirs}.norm_1.weight": state[f"{ours}.input_layernorm.weight"],
            f"{theirs}.attn.qkv.weight": _qkv(state, ours, shape).flatten(0, 1),
            f"{theirs}.attn.proj.weight": state[f"{ours}.self_attention.linear_proj.weight"],
            f"{theirs}.norm_2.weight": state[f"{ours}.pre_mlp_layernorm.weight"],
            f"{theirs}.mlp.fc_1.weight": gate,
            f"{theirs}.mlp.fc_2.weight": up,
            f"{theirs}.mlp.proj.weight": state[f"{ours}.mlp.linear_fc2.weight"],
        }
    return renamed


def transformers_weights(shape: Shape) -> dict[str, Tensor]:
    """Return weights with the names of transformers' Llama (Mixtral, if there are experts).

    q, k and v are three matrices, and so are a dense MLP's.
    """
    state = weights(shape)
    renamed = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        q, k, v = _qkv(state, ours, shape)
        mlp = _experts if shape.experts else _dense_mlp
        renamed |= {
            **mlp(state, f"{ours}.mlp", f"{theirs}.mlp"),
            f"{theirs}.input_layernorm.weight": state[f"{ours}.input_layernorm.weight"],
            f"{theirs}.self_attn.q_proj.weight": q,
            f"{theirs}.self_attn.k_proj.weight": k,
            f"{theirs}.self_attn.v_proj.weight": v,
            f"{theirs}.self_attn.o_proj.weight": state[f"{ours}.self_attention.linear_proj.weight"],
            f"{theirs}.post_attention_layernorm.weight": state[f"{ours}.pre_mlp_layernorm.weight"],
        }
    return renamed


def _dense_mlp(state: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    gate, up = state[f"{ours}.linear_fc1.weight"].chunk(2)
    return {
        f"{theirs}.gate_proj.weight": gate,
        f"{theirs}.up_proj.weight": up,
        f"{theirs}.down_proj.weight": state[f"{ours}.linear_fc2.weight"],
    }


def _experts(state: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    return {
        f"{theirs}.gate.weight": state[f"{ours}.router.weight"],
        f"{theirs}.experts.gate_up_proj": state[f"{ours}.experts.fc1"],
        f"{theirs}.experts.down_proj": state[f"{ours}.experts.fc2"],
    }


def _qkv(state: dict[str, Tensor], prefix: str, shape: Shape) -> Tensor:
    """q, k and v as one tensor [3, hidden, hidden]; Megatron interleaves them by head."""
    by_head = state[f"{prefix}.self_attention.linear_qkv.weight"]
    split = by_head.view(shape.heads, 3, shape.hidden // shape.heads, shape.hidden)
    return split.transpose(0, 1).reshape(3, shape.hidden, shape.hidden)
