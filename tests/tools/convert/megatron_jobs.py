"""Megatron's own GPTModel on gloo ranks: it loads and saves the files under test."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

from tests.plugins.platforms.cpu.megatron_training import megatron_on_the_cpu

from .megatron_files import (
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    KV_RANK,
    NOPE,
    Q_RANK,
    ROPE,
    VALUE,
    VOCABULARY,
    WIDTH,
)


def of_gpt_oss() -> dict[str, Any]:
    """The options with which Megatron has biases of experts and attention sinks."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        "num_query_groups": GROUPS,
        "kv_channels": WIDTH,
        "moe_ffn_hidden_size": FFN,
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    }


@attrs.frozen(kw_only=True)
class Case:
    """A tiny model, and its layout over four ranks."""

    tp: int
    pp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    """Not None: with biases of experts, as gpt-oss has them."""
    tied: bool = False
    latent: str = ""
    """As in ``megatron_files.hugging_face``."""


def build(case: Case) -> Any:
    """Build this rank's stage; the process groups must exist."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        multi_latent_attention,
    )
    from megatron.core.transformer.identity_op import IdentityOp

    experts = EXPERTS if case.ep > 1 or case.latent or case.expert_tp else None
    of_kind: dict[str, Any] = {"num_query_groups": GROUPS}
    if case.expert_tp:
        of_kind = of_gpt_oss()
    elif case.latent:
        of_kind = {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": Q_RANK,
            "kv_lora_rank": KV_RANK,
            "qk_head_dim": NOPE,
            "qk_pos_emb_head_dim": ROPE,
            "v_head_dim": VALUE,
            "rope_type": "rope",
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_ffn_hidden_size": FFN,
            "moe_shared_expert_intermediate_size": FFN,
        }
    options: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "num_moe_experts": experts,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "expert_model_parallel_size": case.ep,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "pipeline_dtype": torch.float32,
        "cuda_graph_scope": [],
    }
    config = (MLATransformerConfig if case.latent else TransformerConfig)(**{**options, **of_kind})
    if case.expert_tp:  # the config refuses 2 with biases; the modules and their shards do not
        config.expert_tensor_parallel_size = case.expert_tp
    if case.latent:
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
        for layer in layers.layer_specs:
            # It has no parameters, and the local one refuses keys and values of two widths.
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
    else:
        layers = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    # Without Transformer Engine its import succeeds, and its classes are no types.
    with mock.patch.object(multi_latent_attention, "HAVE_TE", new=False):
        return GPTModel(
            config,
            layers,
            vocab_size=256,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope",
        )


def load_and_save(
    source: str,
    target: str,
    distributed: str,
    case: Case,
) -> None:
    """Load ``mp_rank_*`` files strictly, and save them again in both of Megatron's formats.

    Then loads the distributed one into a new model, if it is there already.

    Args:
        source, target: Folders with ``mp_rank_*``.
        distributed: A folder of ``torch_dist``, written from the same model.
    """
    Path(target, "torch_dist").mkdir(parents=True, exist_ok=True)
    with megatron_on_the_cpu():
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.validation import StrictHandling
        from megatron.core.enums import ModelType
        from megatron.core.transformer.enums import AttnBackend

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.expert_tp,
        )
        model = build(case)
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if case.pp > 1 else ""
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if case.ep > 1 else ""
        loaded = torch.load(Path(source, name, "model_optim_rng.pt"), weights_only=False)
        model.load_state_dict(loaded["model"], strict=True)
        state = model.state_dict_for_save_checkpoint()
        folder = Path(target, name)
        folder.mkdir(parents=True, exist_ok=True)
        args = Namespace(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            expert_model_parallel_size=case.ep,
            params_dtype=torch.float32,
            attention_backend=AttnBackend.auto,
            model_type=ModelType.encoder_or_decoder,
            save=Path(target),
        )
        torch.save(
            {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": state},
            folder / "model_optim_rng.pt",
        )
        torch.distributed.barrier()
        dist_checkpointing.save(
            {"model": model.sharded_state_dict(), "args": args, "iteration": 7},
            f"{target}/torch_dist",
        )
        again = build(case)
        sharded = {"model": again.sharded_state_dict()}
        # The states of Transformer Engine, which have no counterpart in other formats, are missing.
        found = dist_checkpointing.load(sharded, distributed, strict=StrictHandling.LOG_ALL)
        left = again.load_state_dict(found["model"], strict=False)
        assert not left.unexpected_keys, left
        assert all(name.endswith("_extra_state") for name in left.missing_keys), left
        for name, parameter in model.named_parameters():
            other = again.get_parameter(name)
            rows = slice(VOCABULARY) if "word_embeddings" in name else slice(None)
            if parallel_state.get_tensor_model_parallel_rank() == 0 or rows.stop is None:
                assert torch.equal(parameter[rows], other[rows]), name
