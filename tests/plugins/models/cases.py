"""The families of the parametrised suite, with options off their defaults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

from ascend_run.plugin_api import Claim
from ascend_run.testing.hugging_face.widened import computing_in
from tests.support import family_checks
from tests.support.against_transformers import VOCAB
from tests.support.decoder_layout import NORMS, Tensors, decoder_layout

from . import altered, layouts, plain_grok, published
from .published import Publish

TINY: Final = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # its row of the embedding would have no gradient
}
BASE_500: Final = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
MOE: Final = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,  # Megatron's own in our runs
}
YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
WITH_ALIBI: Final = (Claim.MODEL_FAMILY, Claim.POSITION_BIAS)
GEMMA_NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}
WINDOW: Final = {"use_sliding_window": True, "sliding_window": 6}
LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 3.5, 4.0],
    "short_mscale": 1.2,
    "long_mscale": 0.7,
}
LINEAR: Final = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0}}


@attrs.frozen(kw_only=True)
class Family:
    """One family: what transformers builds, and variants of it."""

    name: str
    """Name of our plugin."""
    variants: Mapping[str, Mapping[str, Any]]
    """Label -> changes of the config; together they move every option off its default."""
    common: Mapping[str, Any] = attrs.field(factory=dict)
    """Changes of every variant."""
    sizes: Mapping[str, Any] = attrs.field(factory=lambda: TINY)
    """Config of every variant, before those changes."""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    """Keys of our config in every run."""
    layout: Callable[[Tensors, Any], Tensors] | None = None
    """Renames transformers' tensors to ours; default: as in Llama, with ``norms``."""
    norms: Mapping[str, str] = attrs.field(factory=lambda: NORMS)
    zero_centered: bool = False
    """The norms multiply by 1 + weight."""
    experts: bool = False
    """Layers have experts, for which there is another layout of two ranks."""
    required: frozenset[str] = family_checks.LLAMA_LIKE
    """Required keys of config.json."""

    shared: frozenset[str] = frozenset()
    """Config fields that several keys map to."""

    owns: tuple[Claim, ...] = (Claim.MODEL_FAMILY,)
    """What the plugin claims."""
    alter: Callable[[nn.Module], None] | None = None
    """Changes what transformers' model computes."""
    stand_in: str = ""
    """For a family that transformers lacks: its family of the same architecture."""
    build: Callable[..., nn.Module] | None = None
    """Builds a model of an architecture that transformers lacks, from its config."""
    publish: Publish | None = None
    """Writes what that model is as a folder of the family's authors."""

    @property
    def shown(self) -> list[str]:
        """Return what its model has beside that of Llama, as keys of configs."""
        return [*self.common, *self.values, *next(iter(self.variants.values()))]

    @property
    def reference(self) -> str:
        """Return transformers' ``model_type`` of the same architecture."""
        return self.stand_in or self.name

    def model(self, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
        """Build a random model with norms and biases unlike initial ones."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        given = copy.deepcopy({**self.sizes, **self.common, **changes})  # transformers changes it
        with computing_in(dtype):
            if self.build is not None:
                model: Any = self.build(**given)
            else:
                config = AutoConfig.for_model(self.reference, **given)
                model = AutoModelForCausalLM.from_config(config)
            if self.experts and self.build is None:
                model.set_experts_implementation("eager")  # the others have no float64
        if self.alter is not None:
            self.alter(model)
        assert next(model.parameters()).dtype is dtype
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name or ".ln_" in name:
                    shift = 1.0 if self.zero_centered else 0.0
                    parameter.uniform_(0.5 - shift, 1.5 - shift)
            for name, buffer in model.named_buffers():
                if name.endswith("bias"):
                    buffer.normal_(0.0, 0.3)
        built: nn.Module = model
        return built

    def in_our_layout(self, theirs: dict[str, Tensor], config: Any) -> Tensors:
        """Rename transformers' tensors to ours."""
        if self.layout is not None:
            return self.layout(theirs, config)
        return decoder_layout(theirs, config, self.norms)


_DENSE: Final = (
    Family(
        name="llama",
        variants={
            "plain": {"rms_norm_eps": 1e-2, **BASE_500},
            "every head its own": {"num_key_value_heads": 4},
            "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
            "attention bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "mlp bias": {"mlp_bias": True, **LINEAR},
        },
    ),
    Family(
        name="qwen2",
        variants={
            "plain": {"rms_norm_eps": 1e-2, **BASE_500},
            "tied, one group, a window": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                **LINEAR,
                **WINDOW,
                "max_window_layers": 1,
            },
        },
        shared=frozenset({"model.window_size", "model.window_attn_skip_freq"}),
    ),
    Family(
        name="qwen3",
        common={"head_dim": 12},
        shared=frozenset({"model.window_size", "model.window_attn_skip_freq"}),
        variants={
            "plain": {"rms_norm_eps": 1e-2, **BASE_500},
            "tied, biases, windows": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                **LINEAR,
                **WINDOW,
                "max_window_layers": 0,
            },
        },
    ),
)
_OWN_LAYOUTS: Final = (
    Family(
        name="gpt2",
        layout=layouts.gpt2,
        required=frozenset({"vocab_size", "n_embd", "n_layer", "n_head"}),
        shared=frozenset({"model.hidden_dropout"}),
        sizes={
            "vocab_size": VOCAB,
            "n_positions": 24,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        variants={
            "tied": {},
            "untied": {"tie_word_embeddings": False, "n_inner": 40, "layer_norm_epsilon": 1e-2},
        },
    ),
    Family(
        name="bloom",
        layout=layouts.bloom,
        owns=WITH_ALIBI,
        alter=altered.with_exact_gelu,
        required=frozenset({"vocab_size", "hidden_size", "n_layer", "n_head"}),
        sizes={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "n_head": 4,
            "n_layer": 2,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        variants={
            "tied": {},
            "untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-2},
        },
    ),
    Family(
        name="deepseek_v2",
        experts=True,
        layout=layouts.latent_decoder,
        shared=frozenset({"model.moe_router_group_topk"}),
        required=family_checks.LLAMA_LIKE | {"num_experts_per_tok"},
        values={"model.moe_aux_loss_coeff": 0},  # Megatron's own
        common={
            "num_key_value_heads": 4,
            "head_dim": 8,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
        variants={
            "yarn": {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}},
            "yarn without magnitudes": {"rope_parameters": YARN},
            "plain queries": {"q_lora_rank": None, "rms_norm_eps": 1e-2, **BASE_500},
            "two of four groups": {
                "topk_method": "group_limited_greedy",
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_group": 4,
                "topk_group": 2,
                **BASE_500,
            },
        },
    ),
)
FAMILIES: Final = (
    *_DENSE,
    *_OWN_LAYOUTS,
    Family(
        name="deepseek_v3",
        experts=True,
        layout=layouts.latent_decoder,
        required=family_checks.LLAMA_LIKE | {"num_experts_per_tok"},
        common={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "rms_norm_eps": 1e-2,
        },
        variants={
            "yarn": {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}},
            "plain queries, tied, two shared": {
                "q_lora_rank": None,
                "rope_interleave": False,
                "n_shared_experts": 2,
                "routed_scaling_factor": 1.5,
                "tie_word_embeddings": True,
                **BASE_500,
            },
        },
    ),
    Family(
        name="minicpm3",
        layout=layouts.latent_decoder,
        common={
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "rms_norm_eps": 1e-2,  # the latents' is another
        },
        variants={
            "longrope": {
                "scale_emb": 3.0,
                "scale_depth": 0.5,
                "dim_model_base": 64,
                "v_head_dim": 12,
                "mlp_bias": True,
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "rope_theta": 500.0,
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 8,
                    "short_factor": [1.0, 1.5, 2.0, 2.5],
                    "long_factor": [2.0, 3.0, 3.5, 4.0],
                },
            },
            "plain queries, tied": {"q_lora_rank": None, **LINEAR},
        },
    ),
    Family(
        name="mixtral",
        experts=True,
        common={"num_local_experts": 4, "router_aux_loss_coef": 0.0},
        variants={
            "two of four": {**BASE_500},
            "three of six, tied": {
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "tie_word_embeddings": True,
                "head_dim": 12,
                "rms_norm_eps": 1e-2,
            },
            "all": {"num_local_experts": 2},
        },
    ),
    Family(
        name="gpt_oss",
        experts=True,
        layout=layouts.gpt_oss,
        common={
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.0,
            "sliding_window": 5,
        },
        variants={
            "low clamp, yarn": {
                "swiglu_limit": 0.8,
                "rms_norm_eps": 1e-2,
                "rope_parameters": {**YARN, "truncate": False},
            },
            "other windows, no attention biases, tied": {
                "attention_bias": False,
                "num_experts_per_tok": 3,
                "num_hidden_layers": 3,
                "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding")],
                "swiglu_alpha": 0.9,
                "tie_word_embeddings": True,
                **BASE_500,
            },
        },
    ),
    Family(
        name="mistral",
        variants={
            "window": {"sliding_window": 5, "head_dim": 12, **LINEAR},
            "no window, tied": {"sliding_window": None, "tie_word_embeddings": True, **BASE_500},
        },
    ),
    Family(
        name="phi3",
        shared=frozenset({"model.hidden_dropout"}),
        variants={
            "window": {"sliding_window": 5, "rms_norm_eps": 1e-2, **BASE_500},
            "longrope": {
                "tie_word_embeddings": True,
                "original_max_position_embeddings": 8,
                "rope_parameters": {
                    "rope_theta": 500.0,
                    "rope_type": "longrope",
                    "partial_rotary_factor": 0.5,
                    "short_factor": [1.0, 1.5],
                    "long_factor": [2.0, 3.0],
                },
            },
        },
    ),
    Family(
        name="phimoe",
        experts=True,
        layout=layouts.phimoe,
        alter=altered.evaluated,
        common={
            "num_local_experts": 6,
            "router_aux_loss_coef": 0.0,
            "router_jitter_noise": 0.3,
        },
        variants={
            "longrope, biases": {
                "attention_bias": True,
                "lm_head_bias": True,
                "rms_norm_eps": 1e-2,
                "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8},
            },
            "short factors, a window, tied": {
                "sliding_window": 5,
                "tie_word_embeddings": True,
                "lm_head_bias": True,
                "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32},
            },
            "plain positions": BASE_500,
        },
    ),
    Family(
        name="gemma",
        common={"head_dim": 12},
        zero_centered=True,
        variants={
            "plain": {"rms_norm_eps": 1e-2, **BASE_500},
            "untied, biases": {"tie_word_embeddings": False, "attention_bias": True, **LINEAR},
        },
    ),
    Family(
        name="gemma2",
        common={"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 4},
        zero_centered=True,
        norms=GEMMA_NORMS,
        variants={
            "low caps": {
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 20,
                "attention_bias": True,
                **BASE_500,
            },
            "other windows, no caps, untied": {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "tie_word_embeddings": False,
                "layer_types": [f"{kind}_attention" for kind in ("full", *["sliding"] * 3)],
            },
        },
    ),
    Family(
        name="gemma3_text",
        common={"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 4},
        zero_centered=True,
        norms=GEMMA_NORMS,
        variants={
            "two bases": {
                "query_pre_attn_scalar": 20,
                "rms_norm_eps": 1e-2,
                "layer_types": [f"{kind}_attention" for kind in ("full", *["sliding"] * 2, "full")],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
                },
            },
            "usual layers, untied, biases": {
                "tie_word_embeddings": False,
                "attention_bias": True,
                "num_hidden_layers": 7,
            },
        },
    ),
    Family(
        name="glm",
        common={"head_dim": 12},
        variants={
            "half rotated": {"rope_parameters": {**BASE_500["rope_parameters"]}},
            "no biases, tied": {
                "attention_bias": False,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "rope_theta": 500.0,
                    "rope_type": "default",
                    "partial_rotary_factor": 1.0,
                },
            },
        },
    ),
    Family(
        name="glm4",
        common={"head_dim": 12, "attention_bias": True},
        norms={
            **NORMS,
            "self_attn_bda.norm": "post_self_attn_layernorm",
            "mlp_bda.norm": "post_mlp_layernorm",
        },
        variants={"half rotated": BASE_500, "tied": {"tie_word_embeddings": True, **LINEAR}},
    ),
    Family(
        name="granite",
        variants={
            "factors": {
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.3,
                "attention_multiplier": 0.2,
                "logits_scaling": 1.7,
                **BASE_500,
            },
            "biases, tied": {
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
                "attention_multiplier": 0.4,
            },
        },
    ),
    Family(
        name="qwen3_moe",
        experts=True,
        common={**MOE, "head_dim": 12},
        variants={
            "normalized": {"norm_topk_prob": True, **BASE_500},
            "not normalized, tied": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                **WINDOW,
            },
        },
        shared=frozenset({"model.window_size"}),
    ),
    Family(
        name="qwen2_moe",
        experts=True,
        shared=frozenset({"model.window_size", "model.window_attn_skip_freq"}),
        common={**MOE, "shared_expert_intermediate_size": 20},
        variants={
            "normalized": {"norm_topk_prob": True, **BASE_500},
            "no biases, a window": {
                "qkv_bias": False,
                "num_experts_per_tok": 3,
                **WINDOW,
                "max_window_layers": 1,
            },
        },
    ),
    Family(
        name="aquila",
        stand_in="llama",
        publish=published.aquila,
        variants={"plain": BASE_500, "tied": {"tie_word_embeddings": True}},
    ),
    Family(
        name="internlm",
        stand_in="llama",
        publish=published.internlm,
        variants={"biases": {"attention_bias": True, **BASE_500}, "no biases": {}},
    ),
    Family(
        name="internlm2",
        stand_in="llama",
        publish=published.internlm2,
        variants={
            "plain": BASE_500,
            "biases, one group": {"attention_bias": True, "num_key_value_heads": 1},
        },
    ),
    Family(
        name="internlm3",
        stand_in="llama",
        publish=published.internlm3,
        variants={"wide heads": {"head_dim": 12, **BASE_500}},
    ),
    Family(
        name="baichuan",
        stand_in="llama",
        publish=published.baichuan,
        common={"num_key_value_heads": 4},
        variants={"plain": BASE_500, "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}},
    ),
    Family(
        name="baichuan_13b",
        stand_in="llama",
        publish=published.baichuan_13b,
        owns=WITH_ALIBI,
        alter=altered.with_alibi,
        common={"num_key_value_heads": 4},
        variants={"plain": {}, "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}},
    ),
    Family(
        name="baichuan2",
        stand_in="llama",
        publish=published.baichuan2,
        alter=altered.with_unit_rows,
        common={"num_key_value_heads": 4},
        variants={"plain": BASE_500},
    ),
    Family(
        name="baichuan2_13b",
        stand_in="llama",
        publish=published.baichuan_13b,
        owns=WITH_ALIBI,
        alter=altered.with_both,
        common={"num_key_value_heads": 4},
        variants={"plain": {"rms_norm_eps": 1e-2}},
    ),
    Family(
        name="qwen",
        stand_in="qwen2",
        publish=published.qwen,
        common={"num_key_value_heads": 4},
        variants={"plain": BASE_500, "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}},
    ),
    Family(
        name="minicpm",
        stand_in="granite",
        publish=published.minicpm,
        common={"attention_multiplier": 8**-0.5, "num_hidden_layers": 4},  # an exact scale_depth
        variants={
            "factors, tied": {
                "tie_word_embeddings": True,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.3,
                "logits_scaling": 4.0,
                **BASE_500,
            },
            "untied": {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
        },
    ),
    Family(
        name="grok1",
        build=plain_grok.Grok,
        layout=layouts.grok1,
        publish=published.grok1,
        experts=True,
        common={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.0,
            "rms_norm_eps": 1e-2,
            "rope_theta": 500.0,
            "attn_output_multiplier": 0.6,
            "max_attn_value": 2.0,
            "embedding_multiplier_scale": 3.0,
            "output_multiplier_scale": 2.5,
            "tie_word_embeddings": True,
        },
        variants={
            "low cap, tied": {},
            "three experts, untied": {"num_experts_per_tok": 3, "tie_word_embeddings": False},
        },
    ),
    Family(
        name="minicpm_moe",
        stand_in="granitemoe",
        publish=published.minicpm_moe,
        experts=True,
        required=family_checks.LLAMA_LIKE | {"num_experts"},
        common={
            "attention_multiplier": 8**-0.5,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "router_aux_loss_coef": 0.0,
        },
        values={"model.moe_aux_loss_coeff": 0},  # Megatron's own
        variants={
            "factors, tied": {
                "tie_word_embeddings": True,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.3,
                "logits_scaling": 4.0,
                **BASE_500,
            },
            "untied": {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
        },
    ),
    Family(
        name="chatglm",
        stand_in="glm",
        publish=published.chatglm,
        common={"head_dim": 12},
        variants={
            "half rotated": BASE_500,
            "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True},
        },
    ),
)
BY_NAME: Final = {family.name: family for family in FAMILIES}
CASES: Final[Mapping[str, tuple[Family, Mapping[str, Any]]]] = {
    f"{family.name}: {label}": (family, changes)
    for family in FAMILIES
    for label, changes in family.variants.items()
}
