"""Megatron's command line as its checkpoints store it, and our ``[model]``. Torch-free."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Final

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.prepare.hugging_face.neutral_fields import neutral_fields
from ascend_run.testing.oracle.known import ALIBI_FAMILIES
from ascend_run.types.config import RunConfig

from .rope_args import rope_args, rope_values
from .shard_layout import DUALPIPEV, LayoutOptions

_SAME: Final = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "init_method_std",
    "window_size",
    "attention_dropout",
    "hidden_dropout",
    "vocab_size",
)
_LATENT: Final = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
_SPARSE: Final = (
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_latent_size",
    "moe_apply_probs_on_input",
    "moe_expert_capacity_factor",
    "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_topk_limited_devices",
    "moe_router_force_load_balancing",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_sparsemixer_eps",
)
_BIASES_OF_SPARSE: Final = (
    "add_qkv_bias",
    "add_linear_proj_bias",
    "add_router_bias",
    "add_expert_bias",
)
"""What ``add_bias_linear`` adds to layers with experts."""
_DENSE_BIAS: Final = "add_dense_bias"
"""MindSpeed's option for the bias of the attention's output projection alone."""
ALIBI: Final = "alibi"
"""MindSpeed's value of ``position_embedding_type``; Megatron has none for ALiBi."""
ALIBI_TYPE: Final = "alibi_fusion_attn_type"
"""MindSpeed's option of how ALiBi is computed; 3: by the square root of the distance."""
LINEAR_ALIBI: Final = (None, 0, 2)
"""Its values by which a slope multiplies the distance itself."""
POSITIONS: Final = ("rope", "learned_absolute", "none")
"""The values of ``position_embedding_type`` that have the same name here."""
_RENAMED: Final = {
    "norm_epsilon": "layernorm_epsilon",
    "swiglu": "gated_linear_unit",
    "num_experts": "num_moe_experts",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""Option of Megatron's command line -> field of its TransformerConfig."""


def empty_slots(args: Mapping[str, Any]) -> set[int]:
    """Return the empty slots of MindSpeed's ``noop_layers``: a set, or a text such as "0,31".

    Raises:
        CheckpointError: They are something else.
    """
    given = args.get("noop_layers") or ()
    try:
        return {int(slot) for slot in (given.split(",") if isinstance(given, str) else given)}
    except (TypeError, ValueError):
        raise CheckpointError(f"noop_layers of the args is {show(given)}, no numbers") from None


def model_values(args: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return ``model.*`` of a checkpoint's command line, for a family's defaults to complete.

    Raises:
        CheckpointError: An option that is needed is not in it, or one changes the model in a way
            that is not read from it.
    """
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if args.get(name) is None]:
        raise CheckpointError(
            f"{where} does not say {', '.join(missing)} of its model; name the run's config.toml "
            "or a Hugging Face config.json with --config"
        )
    scaling, changed = rope_values(args)
    if changed:
        raise CheckpointError(
            f"{where} has options that change the model; name the run's config.toml or a Hugging "
            "Face config.json with --config",
            changed,
        )
    kept = [
        *_SAME,
        *(_LATENT if args.get("multi_latent_attention") else ()),
        *(_SPARSE if args.get("num_experts") else ()),
    ]
    kept += [name for name, value in _switches().items() if args.get(name) not in (None, value)]
    values: dict[str, Any] = {name: args[name] for name in kept if args.get(name) is not None}
    values |= {ours: args[name] for name, ours in _RENAMED.items() if args.get(name) is not None}
    values |= scaling | _activation(args)
    if args.get("multi_latent_attention"):
        values["q_lora_rank"] = args.get("q_lora_rank")  # None: queries have no latent
        values.pop("kv_channels", None)
    if values.get("moe_router_topk_scaling_factor") == 1.0:  # as if there were none
        del values["moe_router_topk_scaling_factor"]
    if args.get("num_experts") and args.get("moe_router_load_balancing_type") == "sinkhorn":
        values |= _weights_with_sinkhorn(args)
    empty, slots = empty_slots(args), args["num_layers"]
    values["num_layers"] = slots - len(empty)
    if (frequency := values.get("moe_layer_freq")) is not None:
        every = isinstance(frequency, int)
        flags = [int(n % frequency == 0) for n in range(slots)] if every else frequency
        kept_flags = [flags[n] for n in range(slots) if n not in empty]
        values["moe_layer_freq"] = kept_flags if 0 in kept_flags else 1
    if args.get("num_experts") and args.get("add_bias_linear"):
        values |= {"add_bias_linear": False, **dict.fromkeys(_BIASES_OF_SPARSE, True)}
        if isinstance(values.get("moe_layer_freq"), list):  # some layers are dense
            values["add_mlp_bias"] = True
    if args.get(_DENSE_BIAS):
        values["add_linear_proj_bias"] = True
    grouped = args.get("group_query_attention", args.get("num_query_groups") is not None)
    values["num_query_groups"] = (
        args["num_query_groups"] if grouped else args["num_attention_heads"]
    )
    untied = args.get("untie_embeddings_and_output_weights", False)
    values["share_embeddings_and_output_weights"] = not untied
    return {f"model.{name}": value for name, value in values.items()}


def _weights_with_sinkhorn(args: Mapping[str, Any]) -> dict[str, object]:
    """Return the weights of a router of Megatron that balances by Sinkhorn, whatever its options
    say: a sigmoid of a single expert, or shares of a softmax over all."""
    if args.get("moe_router_topk", 2) == 1:
        return {"moe_router_score_function": "sigmoid"}
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}


def _switches() -> dict[str, object]:
    """Map each other field that changes the model to the value at which it does not."""
    apart = ("moe_", "num_moe_", "rope_scaling_")
    return {n: value for n, value in neutral_fields().items() if not n.startswith(apart)}


def _activation(args: Mapping[str, Any]) -> dict[str, object]:
    """Return the activation that an option names; empty: the family's."""
    if args.get("quick_geglu"):
        return {"activation": "quick_gelu", "gated_linear_unit": True}
    named = {"swiglu": "silu", "squared_relu": "squared_relu", "openai_gelu": "gelu_tanh"}
    given = next((option for option in named if args.get(option)), None)
    return {"activation": named[given]} if given else {}


def make_args(
    config: RunConfig, options: LayoutOptions, *, padded_rows: int, **more: object
) -> Namespace:
    """Return the command line that Megatron would store, of plain values only.

    Args:
        padded_rows: Rows of the vocabulary with padding.
        more: Options that do not follow from the model and its layout.
    """
    model = config.model
    names: tuple[str, ...] = (*_SAME, *(_LATENT if model.multi_latent_attention else ()))
    names += _SPARSE if model.num_moe_experts else ()
    values: dict[str, object] = {name: _plain(model[name]) for name in names}
    values |= {option: _plain(model[field]) for option, field in _RENAMED.items()}
    values |= {n: _plain(model[n]) for n, value in _switches().items() if model[n] != value}
    values |= rope_args(config)
    if model.family in ALIBI_FAMILIES:
        values["position_embedding_type"] = ALIBI
    values["squared_relu"] = model.activation == "squared_relu"
    if model.activation == "quick_gelu" and model.gated_linear_unit:
        values |= {"quick_geglu": True, "swiglu": False}
    for name in ("kv_channels", "num_query_groups", "ffn_hidden_size"):
        values[name] = model_value(config, name)
    slots = model.num_layers + len(options.noop_layers)
    vpp = 2 if options.schedules_method == DUALPIPEV else options.vpp
    biases = linear_biases(model)
    all_biases = biases.experts if model.num_moe_experts else biases.mlp  # or it is not written
    values["add_bias_linear"] = all_biases
    if biases.proj and not all_biases:
        values[_DENSE_BIAS] = True
    if model.num_moe_experts:
        sparse = iter([int(n in moe_layers(model)) for n in range(model.num_layers)])
        empty = {*options.noop_layers}
        values["moe_layer_freq"] = [0 if n in empty else next(sparse) for n in range(slots)]
        values["moe_ffn_hidden_size"] = model_value(config, "moe_ffn_hidden_size")
    values |= {
        "num_layers": slots,
        "group_query_attention": values["num_query_groups"] != model.num_attention_heads,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "padded_vocab_size": padded_rows,
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "expert_model_parallel_size": options.ep,
        "expert_tensor_parallel_size": options.expert_tp or options.tp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": slots // options.pp // vpp if vpp > 1 else None,
        "schedules_method": options.schedules_method,
        "num_layer_list": ",".join(map(str, options.num_layer_list)) or None,
        "noop_layers": {*options.noop_layers} or None,
        "moe_tp_extend_ep": options.moe_tp_extend_ep,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return Namespace(**values, **more)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
