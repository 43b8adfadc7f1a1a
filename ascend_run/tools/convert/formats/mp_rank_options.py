"""The ``mp_rank_*`` files that a user asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.plugin_api.errors import LayoutError
from ascend_run.types.config import RunConfig

from .expert_shards import ExpertNames
from .latent_attention import require_megatron_attention
from .megatron_names import Names
from .shard_layout import LayoutOptions

_NOT_IN_LEGACY: Final = re.compile(r"\.(shared_experts\.|softmax_offset$|router\.bias$)")
_EXPERT_BIAS: Final = re.compile(r"\.mlp\.experts\.fc[12]_bias$")


@attrs.frozen(kw_only=True)
class MpRankOptions:
    """The files that a user asks for."""

    layout: LayoutOptions
    names: Names = Names.LOCAL
    experts: ExpertNames = ExpertNames.SEQUENTIAL
    mla_qkv_concat: bool = False
    """Multi-latent attention in MindSpeed's modules."""
    mla_mm_split: bool = False
    """Its up projections divided."""
    make_vocab_size_divisible_by: int | None = None
    """None: the model's."""


def mp_rank_options(given: Mapping[str, Any], *, legacy: bool) -> MpRankOptions:
    """Return the options of a command line.

    Args:
        given: Values by name, as the command declares them.

    Raises:
        LayoutError: They contradict each other; lists all problems.
    """
    fields = {field.name for field in attrs.fields(LayoutOptions)}
    names = Names(given["transformer_impl"])
    split, concat = given["mla_mm_split"], given["mla_qkv_concat"] or given["mla_mm_split"]
    problems = [
        f"mp-rank-legacy has names of its own; leave out --{name.replace('_', '-')}"
        for name in ("moe_grouped_gemm", "mla_qkv_concat", "mla_mm_split")
        if legacy and given[name]
    ]
    if names is not Names.LOCAL and legacy:
        problems.append("mp-rank-legacy has names of its own; leave out --transformer-impl")
    if names is not Names.LOCAL and concat:
        problems.append(
            "--mla-qkv-concat and --mla-mm-split are of MindSpeed's own modules; leave out "
            f"--transformer-impl {names}"
        )
    if given["moe_use_legacy_grouped_gemm"] and not given["moe_grouped_gemm"]:
        problems.append("--moe-use-legacy-grouped-gemm needs --moe-grouped-gemm")
    if problems:
        raise LayoutError("these options contradict each other", problems)
    return MpRankOptions(
        layout=LayoutOptions(**{name: given[name] for name in fields}),
        names=Names.LEGACY if legacy else names,
        experts=_expert_names(
            names,
            grouped=given["moe_grouped_gemm"],
            legacy=given["moe_use_legacy_grouped_gemm"],
        ),
        mla_qkv_concat=concat,
        mla_mm_split=split,
        make_vocab_size_divisible_by=given["make_vocab_size_divisible_by"],
    )


def _expert_names(names: Names, *, grouped: bool, legacy: bool) -> ExpertNames:
    if not grouped:
        return ExpertNames.SEQUENTIAL
    engine = names is Names.TRANSFORMER_ENGINE and not legacy
    return ExpertNames.NUMBERED if engine else ExpertNames.GROUPED


def for_biases_of_experts(options: MpRankOptions, config: RunConfig) -> MpRankOptions:
    """Return options whose experts are whole where they have biases, unless a size is named.

    Source: megatron-core 0.16, ``TransformerConfig.__post_init__``: "Bias in Moe is only supported
    when ETP==1".
    """
    layout = options.layout
    has_biases = config.model.num_moe_experts and linear_biases(config.model).experts
    if not has_biases or layout.expert_tp or layout.moe_tp_extend_ep:
        return options
    return attrs.evolve(options, layout=attrs.evolve(layout, expert_tp=1))


def unwritable(name: str, options: MpRankOptions) -> str | None:
    """Return why files of these options cannot have a parameter; None if they can."""
    if options.names is Names.LEGACY and _NOT_IN_LEGACY.search(name):
        return f"parameter {name} does not exist in megatron.legacy; use mp-rank"
    if options.experts is ExpertNames.GROUPED and _EXPERT_BIAS.search(name):
        return (
            f"parameter {name}: experts in weight1 and weight2 have no biases; leave out "
            "--moe-grouped-gemm, or name it with --transformer-impl transformer_engine and "
            "without --moe-use-legacy-grouped-gemm"
        )
    return None


def require_latent(options: MpRankOptions, config: RunConfig) -> None:
    """
    Raises:
        LayoutError: Options of multi-latent attention are given, or legacy names for a model that
            has it.
        CheckpointError: Megatron's latent attention computes something else.
    """
    latent = bool(config.model.multi_latent_attention)
    if options.mla_qkv_concat and not latent:
        raise LayoutError(
            "--mla-qkv-concat and --mla-mm-split are for models with multi-latent attention"
        )
    if not options.mla_qkv_concat:
        require_megatron_attention(config)
    if options.names is Names.LEGACY and latent:
        raise LayoutError(
            "megatron.legacy has no multi-latent attention; use mp-rank instead of mp-rank-legacy"
        )
