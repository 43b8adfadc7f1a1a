"""The first Qwen: q, k and v packed, with biases; names of its own."""

from __future__ import annotations

from ascend_run.families import DECODER, FamilyPlugin, derived, family_manifest, forms, fused_qkv
from ascend_run.plugin_api import ConfigKey


class Qwen(FamilyPlugin):
    """The authors' ``qwen``.

    Its log-n scaling and dynamic NTK act only outside of training, on more than ``seq_length``
    tokens: the former in evaluation if ``model.max_position_embeddings`` is raised, the latter
    never.
    """

    family = derived(
        DECODER,
        model_type="qwen",
        architecture="QWenLMHeadModel",
        defaults={
            "model.add_qkv_bias": True,
            "model.layernorm_epsilon": 1e-6,
            "model.log_n_scaling_in_training": False,
        },
        keys=(
            ConfigKey(hf="intermediate_size", field="model.ffn_hidden_size", form=forms.DOUBLED),
            ConfigKey(hf="layer_norm_epsilon", field="model.layernorm_epsilon", default=1e-6),
            ConfigKey(hf="rotary_emb_base", field="model.rotary_base", default=10000.0),
            ConfigKey(hf="seq_length", field="model.max_position_embeddings", default=2048),
            ConfigKey(
                hf="use_logn_attn",
                field="model.log_n_scaling_length",
                default=True,
                form=forms.LOG_N,
            ),
            ConfigKey(hf="attn_dropout_prob", field="model.attention_dropout", default=0.0),
            ConfigKey(hf="kv_channels", field="model.kv_channels", default=128),
        ),
        without=(
            "attention_dropout",
            "head_dim",
            "hidden_act",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
        ),
        fixed={
            "emb_dropout_prob": 0.0,
            "no_bias": True,
            "rotary_pct": 1.0,
            "scale_attn_weights": True,
        },
        ignored=(
            "bf16",
            "fp16",
            "fp32",
            "max_position_embeddings",
            "onnx_safe",
            "softmax_in_fp32",
            "tokenizer_class",
            "tokenizer_type",
            "use_cache_kernel",
            "use_cache_quantization",
            "use_dynamic_ntk",
            "use_flash_attn",
        ),
        names={
            "model.layers.": "transformer.h.",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "self_attn.": "attn.",
            "o_proj": "c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
        },
        buffers=(r"transformer\.(h\.\d+\.attn\.)?rotary_emb\.inv_freq",),
        tensors=fused_qkv("self_attn.c_attn"),
    )
    manifest = family_manifest(family, "Qwen (first)", source="arXiv:2309.16609")
