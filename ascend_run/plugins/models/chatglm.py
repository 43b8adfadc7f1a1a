"""ChatGLM3 and the first GLM-4: fused projections under names of their own."""

from __future__ import annotations

from ascend_run.families import (
    DECODER,
    FamilyPlugin,
    derived,
    family_manifest,
    forms,
    fused_gate_up,
    fused_qkv,
)
from ascend_run.plugin_api import ConfigKey


class ChatGlm(FamilyPlugin):
    """The authors' ``chatglm``."""

    family = derived(
        DECODER,
        model_type="chatglm",
        architecture="ChatGLMModel",
        defaults={
            "model.add_qkv_bias": True,
            "model.kv_channels": 128,
            "model.rotary_interleaved": True,
            "model.rotary_percent": 0.5,
        },
        keys=(
            ConfigKey(hf="padded_vocab_size", field="model.vocab_size"),
            ConfigKey(hf="num_layers", field="model.num_layers", also="num_hidden_layers"),
            ConfigKey(hf="ffn_hidden_size", field="model.ffn_hidden_size"),
            ConfigKey(hf="multi_query_group_num", field="model.num_query_groups", default=1),
            ConfigKey(hf="kv_channels", field="model.kv_channels", default=128),
            ConfigKey(hf="seq_length", field="model.max_position_embeddings", default=2048),
            ConfigKey(hf="layernorm_epsilon", field="model.layernorm_epsilon", default=1e-5),
            ConfigKey(hf="add_qkv_bias", field="model.add_qkv_bias", default=False),
            ConfigKey(hf="hidden_dropout", field="model.hidden_dropout", default=0.0),
            ConfigKey(
                hf="rope_ratio", field="model.rotary_base", default=1.0, form=forms.ROPE_RATIO
            ),
        ),
        without=(
            *("vocab_size", "num_hidden_layers", "intermediate_size", "num_key_value_heads"),
            *("head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta"),
            "initializer_range",
        ),
        fixed={
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "multi_query_attention": True,
            "original_rope": True,
            "post_layer_norm": True,
            "rmsnorm": True,
        },
        ignored=(
            *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion"),
            *("classifier_dropout", "fp32_residual_connection", "pre_seq_len", "vocab_size"),
            *("prefix_projection", "quantization_bit"),
        ),
        tensors=(
            *fused_qkv("self_attention.query_key_value"),
            *fused_gate_up("mlp.dense_h_to_4h"),
        ),
        buffers=(r"transformer\.rotary_pos_emb\.inv_freq",),
        names={
            "model.layers.": "transformer.encoder.layers.",
            "model.embed_tokens.": "transformer.embedding.word_embeddings.",
            "model.norm.": "transformer.encoder.final_layernorm.",
            "lm_head.": "transformer.output_layer.",
            ".self_attn.o_proj.": ".self_attention.dense.",
            ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
        },
    )
    manifest = family_manifest(family, "ChatGLM", source="arXiv:2406.12793")
