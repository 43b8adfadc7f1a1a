"""Switches of a model that Megatron's GPTModel lacks. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.core.config.built_in import QUICK_GELU_ALPHA
from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.prepare.hugging_face.neutral_fields import neutral_fields
from ascend_run.testing.oracle.known import ALIBI_FAMILIES
from ascend_run.tools.convert.position_biases import has_unnamed_bias
from ascend_run.types.config import RunConfig

from .megatron_args import ALIBI

_LACKING: Final = {
    "scale_embedding": "multiplies embeddings by the square root of hidden_size; Megatron's "
    "LanguageModelEmbedding has no factor",
    "embedding_multiplier": "multiplies embeddings; Megatron's LanguageModelEmbedding has no "
    "factor",
    "residual_multiplier": "multiplies the output of each attention and MLP block; Megatron's "
    "TransformerLayer adds it without a factor",
    "logits_scaling": "divides the logits; Megatron's GPTModel has no factor on them",
    "num_labels": "replaces the output layer by a score head; Megatron's GPTModel has none",
    "normalize_output_rows": "divides the rows of the output layer by their lengths; Megatron's "
    "ColumnParallelLinear does not",
    "final_logit_softcapping": "caps the logits; Megatron's GPTModel has no cap",
    "attn_logit_softcapping": "caps the attention scores; Megatron's SelfAttention has no cap",
    "log_n_scaling_length": "multiplies queries beyond this position by a ratio of logarithms; "
    "Megatron's SelfAttention does not",
}
"""Field of ``[model]`` -> what it does beyond Megatron. Source: megatron-core 0.16."""


def switch_problems(config: RunConfig) -> list[str]:
    """Return why Megatron would compute something else with this model's weights."""
    return [
        *_lacking(config).values(),
        *_position_problems(config),
        *_bias_problems(config),
        *_activation_problems(config),
    ]


def require_stated(config: RunConfig, args: Mapping[str, Any], where: str) -> None:
    """Check that no default of a family adds what Megatron does not compute, unless the args say
    so.

    Raises:
        CheckpointError: Lists all problems.
    """
    problems = [text for name, text in _lacking(config).items() if args.get(name) is None]
    if problems:
        raise CheckpointError(
            f"the args of {where} do not say what this model family adds to Megatron's GPTModel; "
            "name the run's config.toml or a Hugging Face config.json with --config",
            problems,
        )


def _lacking(config: RunConfig) -> dict[str, str]:
    """Map each switch that acts in this model, and not in Megatron, to what it does."""
    neutral = neutral_fields()
    return {
        name: f"model.{name}={show(config.model[name])} {what}"
        for name, what in _LACKING.items()
        if config.model[name] != neutral[name]
    }


def _position_problems(config: RunConfig) -> list[str]:
    """Return why Megatron's args have no value for the positions."""
    family = config.model.family
    problem = (
        f"model family {family} adds a position bias to the attention scores; Megatron's args have "
        f"no value for it: position_embedding_type={ALIBI} stands for {', '.join(ALIBI_FAMILIES)}"
    )
    return [problem] if has_unnamed_bias(family) else []


def _bias_problems(config: RunConfig) -> list[str]:
    """Return why Megatron has no model with these biases.

    ``--add-bias-linear`` adds all those of a layer, ``--add-qkv-bias`` those of queries, keys and
    values, and MindSpeed's ``--add-dense-bias`` that of the attention's output projection.
    """
    model, biases = config.model, linear_biases(config.model)
    has = {"add_qkv_bias": biases.qkv, "add_linear_proj_bias": biases.proj}
    of_mlp: dict[str, bool] = {}
    if model.num_moe_experts:
        of_mlp = {"add_router_bias": biases.router, "add_expert_bias": biases.experts}
    if len(moe_layers(model)) < model.num_layers:
        of_mlp["add_mlp_bias"] = biases.mlp
    has |= of_mlp
    lacking = ", ".join(f"model.{name}" for name, value in has.items() if not value)
    others = ", ".join(f"model.{name}" for name, value in has.items() if value)
    problem = (
        f"{lacking}=false with {others}=true: Megatron adds the biases of attention, MLP, router "
        "and experts together, with --add-bias-linear"
    )
    return [problem] if lacking and any(of_mlp.values()) else []


def _activation_problems(config: RunConfig) -> list[str]:
    """Return why Megatron does not have the activation."""
    alpha = config.model.quick_gelu_alpha
    problem = (
        f"model.quick_gelu_alpha={alpha}: Megatron's quick GELU has the factor "
        f"{QUICK_GELU_ALPHA}, and no option for another"
    )
    return [] if alpha == QUICK_GELU_ALPHA else [problem]
