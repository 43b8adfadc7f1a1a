"""Adapters in checkpoints of runs with ``lora``.

Under a linear's name stand ``adapter.lora_A`` [P * R, in], a block of rows per adapted part, and
``adapter.lora_B.PART`` [rows, R], with rows in Hugging Face's order of that part. Megatron
interleaves the rows of queries, keys and values by key-value group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.ops.linear.low_rank import low_rank_update, of_part, scale_of
from ascend_run.ops.weight_sources import weights_digest
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.types.config import RunConfig

from .expert_adapters import adapted_experts, is_of_experts, updates_of_run
from .merging import Update, merged
from .quantised_base import with_run_values

_PLUGIN: Final = "lora"
_NAME: Final = re.compile(r"(.+)\.adapter\.lora_(?:A|(?:B|magnitude)\.(.+))")
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "shared_experts_fc1": ("shared_experts_fc1_gate", "shared_experts_fc1_up"),
}
"""Kind of linear -> its parts in Megatron's order; others are one part, with the kind's name."""


def has_adapters(headers: Mapping[str, Tensor]) -> bool:
    return any(map(_is_adapter, headers))


def without_adapters(source: ModelSource) -> ModelSource:
    """Return the parameters that are no adapters."""
    kept = {name: t for name, t in source.headers.items() if not _is_adapter(name)}
    return attrs.evolve(source, headers=kept)


def _is_adapter(name: str) -> bool:
    return _NAME.fullmatch(name) is not None or is_of_experts(name)


def lacks_base(headers: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint leaves out what is frozen: the weights beside the adapters."""
    weights = [f"{linear}.weight" for linear in adapted_parts(headers)]
    weights += [one.weight for one in adapted_experts(headers)]
    return any(weight not in headers for weight in weights)


def adapted_parts(headers: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the adapted linears and their parts, in the order of the blocks of ``lora_A``."""
    linears: dict[str, list[str]] = {}
    for name in headers:
        if (match := _NAME.fullmatch(name)) and not is_of_experts(name):
            linears.setdefault(match[1], []).extend([match[2]] if match[2] else [])
    for linear, named in linears.items():
        parts = [*dict.fromkeys(named)]
        known = _PARTS.get(kind_of(linear), ())
        linears[linear] = [part for part in known if part in parts] or parts
    return linears


def require_same_base(values: Mapping[str, Any], adapters: ModelSource, base: Path) -> None:
    """Check that a folder has the weights beside which a checkpoint's adapters were trained.

    Raises:
        CheckpointError: It has others, or there is no record.
    """
    if adapter_record(values, adapters)["base"] != weights_digest(base):
        raise CheckpointError(
            f"the adapters in {adapters.folder} were trained beside other weights than those in "
            f"{base}; name their folder with --base"
        )


def with_run_adapters(
    base: ModelSource, adapters: ModelSource, values: Mapping[str, Any]
) -> ModelSource:
    """Return the base with a checkpoint's adapters merged into it.

    Args:
        values: The JSON values of the checkpoint.

    Raises:
        CheckpointError: An adapter does not fit the base. Lists all problems.
    """
    record = adapter_record(values, adapters)
    problems: list[str] = []
    updates = updates_of_run(base, adapters, record, problems)
    for linear, order in adapted_parts(adapters.headers).items():
        weight = f"{linear}.weight"
        if weight not in base.headers:
            problems.append(f"{weight} is not in {base.folder}")
            continue
        header = base.headers[weight]
        under = f"{linear}.adapter.lora_"
        a = adapters.headers.get(f"{under}A", torch.empty(0, 0))
        ranks = _ranks(adapters, linear, order)
        if a.shape[1] != header.shape[1] or sum(ranks) != len(a) or not ranks:
            problems.append(
                f"{linear}: lora_A is {[*a.shape]} beside {len(order)} lora_B of rank "
                f"{sorted({*ranks})}, the weight {[*header.shape]}"
            )
            continue
        updates[weight] = _update(adapters, record, linear, order, base.config)
    if problems:
        raise CheckpointError(f"the adapters in {adapters.folder} do not fit", problems)
    base = with_run_values(base, values)
    return attrs.evolve(merged(base, updates), step=adapters.step, folder=adapters.folder)


def adapter_record(values: Mapping[str, Any], adapters: ModelSource) -> Mapping[str, Any]:
    """Return what the plugin has stored of its options and of the base."""
    record = values.get(_PLUGIN)
    if not isinstance(record, Mapping) or not {"alpha", "rslora", "base"} <= record.keys():
        raise CheckpointError(
            f"{adapters.folder} has adapters, but no record of {_PLUGIN}; their scale is not known"
        )
    return record


def _update(
    adapters: ModelSource,
    record: Mapping[str, Any],
    linear: str,
    order: list[str],
    config: RunConfig,
) -> Update:
    def update(dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        a = adapters.tensor(f"{linear}.adapter.lora_A")
        kind, updates = kind_of(linear), {}
        magnitudes: dict[str, Tensor] = {}
        blocks = a.split(_ranks(adapters, linear, order))
        for part, block in zip(order, blocks, strict=True):
            alpha = alpha_of_part(record, kind, part)
            scale = scale_of(alpha, len(block), rslora=record["rslora"])
            b = adapters.tensor(f"{linear}.adapter.lora_B.{part}")
            updates[part] = low_rank_update(block, b, scale, dtype)
            if record.get("dora"):
                vector = adapters.tensor(f"{linear}.adapter.lora_magnitude.{part}")
                magnitudes[part] = vector[:, None]
        whole = in_megatrons_order(kind, updates, config)
        return whole, in_megatrons_order(kind, magnitudes, config)[:, 0] if magnitudes else None

    return update


def alpha_of_part(record: Mapping[str, Any], linear: str, part: str) -> float:
    """Return the alpha of a part's adapter from what the plugin has stored."""
    pattern: Mapping[str, float] = record.get("alpha_pattern", {})
    alpha: float = record["alpha"]
    return of_part(pattern, linear, part, alpha)


def _ranks(adapters: ModelSource, linear: str, order: list[str]) -> list[int]:
    """Return the rank of each part, in the order of the blocks of ``lora_A``."""
    return [adapters.headers[f"{linear}.adapter.lora_B.{part}"].shape[1] for part in order]


def kind_of(linear: str) -> str:
    """Return the name of a linear in options: that in its block, of shared experts their own."""
    block, _, short = linear.rpartition(".")
    is_shared = block.endswith(".shared_experts")
    return short.replace("linear", "shared_experts") if is_shared else short


def in_megatrons_order(kind: str, updates: Mapping[str, Tensor], config: RunConfig) -> Tensor:
    """Return the update of a weight from those of its parts; a part without one has zeros."""
    if kind in updates:
        return updates[kind]
    given = next(iter(updates.values()))
    columns = given.shape[1]
    if kind == "linear_qkv":
        groups = model_value(config, "num_query_groups")
        head = model_value(config, "kv_channels")
        queries = config.model.num_attention_heads // groups
        rows = {"linear_q": queries * head, "linear_k": head, "linear_v": head}
    else:
        groups = 1
        width = "ffn_hidden_size" if kind == "linear_fc1" else "moe_shared_expert_intermediate_size"
        rows = dict.fromkeys(_PARTS[kind], model_value(config, width))
    blocks = [
        updates[part].unflatten(0, (groups, count))
        if part in updates
        else given.new_zeros(groups, count, columns)
        for part, count in rows.items()
    ]
    return torch.cat(blocks, dim=1).flatten(0, 1)
