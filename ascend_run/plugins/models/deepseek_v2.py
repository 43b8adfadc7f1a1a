"""DeepSeek-V2: a decoder with multi-latent attention and, after dense layers, experts."""

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
from ascend_run.families.expert_forms import TOPK_METHOD
from ascend_run.plugin_api import ConfigKey


class DeepseekV2(FamilyPlugin):
    """Hugging Face's ``deepseek_v2``."""

    family = derived(
        DECODER,
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        defaults={
            "model.layernorm_epsilon": 1e-6,
            "model.latent_layernorm_epsilon": 1e-6,  # whatever that of the other norms
            "model.multi_latent_attention": True,
            "model.qk_layernorm": True,  # of the latents
            # The weights of the selected experts come from a softmax over all experts and are not
            # normalized to a sum of 1.
            **EXPERT_DEFAULTS,
            "model.moe_router_pre_softmax": True,
            "model.moe_router_load_balancing_type": "seq_aux_loss",  # as the authors' training
            "model.moe_router_topk_scaling_factor": 1.0,
        },
        keys=(
            *latent_keys(1536, 512, plain=128, rotated=64),
            ConfigKey(hf="v_head_dim", field="model.v_head_dim", default=128),
            *deepseek_expert_keys(experts=64, width=1407, shared=2, dense=0, factor=1.0),
            *group_keys(None, None),
            ConfigKey(
                hf="topk_method",
                field="model.moe_router_group_topk",
                default="greedy",
                form=TOPK_METHOD,
            ),
        ),
        fixed={
            "attention_bias": False,
            "mlp_bias": False,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
        ignored=(
            "aux_loss_alpha",  # transformers adds no such loss; model.moe_aux_loss_coeff does
            "ep_size",
            "head_dim",  # these two follow from the widths above
            "qk_head_dim",
            "output_router_logits",
            "pretraining_tp",
            "seq_aux",  # neither; model.moe_router_load_balancing_type does
        ),
        without=("self_attention.", "mlp."),
        tensors=(*latent_tensors(), *deepseek_expert_tensors()),
    )
    manifest = family_manifest(
        family,
        "DeepSeek-V2",
        aliases=("deepseek",),
        source="arXiv:2405.04434",
        requires=(needs_latent_attention("DeepSeek-V2", "mixtral"),),
    )
