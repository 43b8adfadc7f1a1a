"""The training step of each peer: its model class, its loss, and AdamW on its parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import llama, peer_weights

Step = Callable[[int], float]


@attrs.frozen(kw_only=True)
class Setting:
    """Settings that are the same for all systems."""

    shape: llama.Shape
    dtype: torch.dtype
    device: str


def litgpt(given: Setting, *, compiled: bool = False) -> Step:
    from litgpt import GPT, Config

    shape = given.shape
    config = Config(
        name="llama-of-the-comparison", block_size=shape.seq_length, vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab, n_layer=shape.layers, n_head=shape.heads,
        n_embd=shape.hidden, intermediate_size=shape.ffn, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", norm_eps=1e-5,
    )  # fmt: skip
    model = GPT(config)
    model.load_state_dict(peer_weights.litgpt_weights(shape), strict=False)
    model.to(device=given.device, dtype=given.dtype)
    model.max_seq_length = shape.seq_length
    call: Any = torch.compile(model) if compiled else model
    return _step(given, model, lambda tokens, labels: _cross_entropy(call(tokens), labels))


def transformers(given: Setting, *, compiled: bool = False) -> Step:
    """transformers' model class with torch's attention kernel, and with its grouped experts."""
    model = transformers_model(given)
    call: Any = torch.compile(model) if compiled else model
    return _step(given, model, lambda tokens, labels: _cross_entropy(call(tokens).logits, labels))


def transformers_recomputing(given: Setting) -> Step:
    """The same class with gradient checkpointing, in bf16.

    With float32 weights under autocast, as transformers' trainer does: weights and moments have the
    dtypes of a run of ascend-run.
    """
    model = transformers_model(given)
    model.gradient_checkpointing_enable()

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(given.device, torch.bfloat16):
            return _cross_entropy(model(tokens).logits, labels)

    return _step(given, model, loss_of)


def transformers_liger(given: Setting) -> Step:
    """The same class with all of Liger's kernels, including the fused output layer and loss.

    They are written in Triton and need a GPU.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()  # replaces classes, so it comes before the model
    model = transformers_model(given)
    call: Any = torch.compile(model)
    return _step(given, model, lambda tokens, labels: call(tokens, shift_labels=labels).loss)


def transformers_model(given: Setting) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shape = given.shape
    experts = {
        "num_local_experts": shape.experts, "num_experts_per_tok": shape.topk,
        "experts_implementation": "grouped_mm", "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    make_config: Any = partial(MixtralConfig, **experts) if shape.experts else LlamaConfig
    config = make_config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.seq_length, rms_norm_eps=1e-5, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = (MixtralForCausalLM if shape.experts else LlamaForCausalLM)(config)
    model.load_state_dict(peer_weights.transformers_weights(shape))
    # Parameters alone, as transformers itself does: the rotary frequencies stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(given.dtype)
    return model.to(given.device).train()


def megatron_local(given: Setting) -> Step:
    """Megatron's local layer spec with the minimal facade that runs it on a CPU.

    Its experts are computed one after the other.
    """
    from .minimal_facade import megatron_on_the_cpu

    with megatron_on_the_cpu():
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

    shape = given.shape
    experts: dict[str, Any] = {
        "num_moe_experts": shape.experts, "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.ffn, "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        ffn_hidden_size=shape.ffn, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-5, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, params_dtype=given.dtype,
        bias_activation_fusion=False, masked_softmax_fusion=False,
        **(experts if shape.experts else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=shape.experts or None, normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=shape.vocab,
        max_sequence_length=shape.seq_length, position_embedding_type="rope",
    )  # fmt: skip
    model.load_state_dict(peer_weights.megatron_weights(shape), strict=False)
    model.to(given.dtype)
    mask = torch.ones(1, 1, shape.seq_length, shape.seq_length).tril() < 0.5
    positions = torch.arange(shape.seq_length).expand(shape.micro_batch, -1)
    return _step(
        given,
        model,
        lambda tokens, labels: model(tokens, positions, mask, labels=labels).mean(),
    )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _step(given: Setting, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=llama.LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
        fused=True,
    )  # fmt: skip

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*llama.batch(given.shape, index, given.device))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
