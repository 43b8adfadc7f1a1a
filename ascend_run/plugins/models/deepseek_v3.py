"""DeepSeek-V3: latent attention, and experts in groups that a bias balances without a loss."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    EXPERT_DEFAULTS,
    FamilyPlugin,
    deepseek_expert_keys,
    deepseek_expert_tensors,
    derived,
    family_manifest,
    group_keys,
    latent_keys,
    latent_tensors,
    needs_latent_attention,
)
from ascend_run.families.decoder import HF_LAYER, LAYER
from ascend_run.plugin_api import ConfigKey, TensorMap


class DeepseekV3(FamilyPlugin):
    """Hugging Face's ``deepseek_v3``."""

    family = derived(
        DECODER,
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        defaults={
            "model.layernorm_epsilon": 1e-6,
            "model.latent_layernorm_epsilon": 1e-6,  # whatever that of the other norms
            "model.multi_latent_attention": True,
            "model.qk_layernorm": True,  # of the latents
            **EXPERT_DEFAULTS,
            "model.moe_router_score_function": "sigmoid",
            "model.moe_router_enable_expert_bias": True,
            "model.moe_router_topk_scaling_factor": 2.5,
            # The bias balances the experts; the authors' coefficient is 0.0001.
            "model.moe_router_load_balancing_type": "seq_aux_loss",
            "model.moe_aux_loss_coeff": 0.0,
        },
        keys=(
            *latent_keys(1536, 512, plain=128, rotated=64),
            ConfigKey(hf="v_head_dim", field="model.v_head_dim", default=128),
            ConfigKey(hf="rope_interleave", field="model.latent_rotary_interleaved", default=True),
            *deepseek_expert_keys(experts=256, width=2048, shared=1, dense=3, factor=2.5),
            *group_keys(8, 4),
        ),
        key_defaults={"num_key_value_heads": 128, "max_position_embeddings": 4096},
        fixed={
            "attention_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        ignored=(
            "aux_loss_alpha",  # transformers adds no such loss; model.moe_aux_loss_coeff does
            "ep_size",
            "head_dim",  # these two follow from the widths above
            "qk_head_dim",
            "num_nextn_predict_layers",  # written without these layers, too
            "output_router_logits",
            "pretraining_tp",
            "seq_aux",
        ),
        without=("self_attention.", "mlp."),
        tensors=(
            *latent_tensors(),
            *deepseek_expert_tensors(),
            TensorMap(
                megatron=f"{LAYER}.mlp.router.expert_bias",
                hf=(f"{HF_LAYER}.mlp.gate.e_score_correction_bias",),
                layers="experts",
            ),
        ),
    )
    manifest = family_manifest(
        family,
        "DeepSeek-V3",
        source="arXiv:2412.19437",
        requires=(needs_latent_attention("DeepSeek-V3", "qwen3_moe"),),
    )
