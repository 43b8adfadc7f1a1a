"""Adapters of experts: in checkpoints of runs with ``lora``, and in PEFT's format.

Under ``MODULE.experts.adapter`` stand ``lora_A.experts_fc1`` [E, R, H], and ``lora_B.experts_fc1``
[E, F, R], of a gated fc1 ``lora_B.experts_fc1_gate`` and ``lora_B.experts_fc1_up``; the same for
fc2. Their weights are ``MODULE.experts.fc1`` and ``fc2``.
"""

# E experts, R rank of the adapter, H hidden size, F expert FFN size

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import ParameterSource, parameter_sources
from ascend_run.ops.linear.low_rank import low_rank_update, of_part, scale_of
from ascend_run.ops.linear.peft_experts import a_by_expert, b_by_expert, stacked_a, stacked_b
from ascend_run.ops.linear.peft_settings import (
    EXPERT_PARAMETERS,
    alpha_of,
    expert_parameters,
    rank_of,
)
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.model_source import ModelSource

from .merging import Update

_NAME: Final = re.compile(
    r"(.+\.experts)\.adapter\.lora_(?:A\.experts_(fc[12])|B\.experts_(fc[12])(?:_gate|_up)?)"
)
_STORED: Final = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.0\.[^.]+\.weight")
_PARAMETERS: Final = dict(zip(("fc1", "fc2"), EXPERT_PARAMETERS, strict=True))


@attrs.frozen
class ExpertMatrices:
    """The adapter of one stacked weight in a checkpoint."""

    weight: str  #: Name of the weight.
    a: str
    b: tuple[str, ...]  #: Blocks of the weight's rows, in its order.

    @property
    def part(self) -> str:
        """Its name in the plugin's options."""
        return f"experts_{self.weight.rpartition('.')[2]}"


def is_of_experts(name: str) -> bool:
    """Return whether a parameter belongs to an adapter of experts."""
    return _NAME.fullmatch(name) is not None


def adapted_experts(headers: Mapping[str, Tensor]) -> list[ExpertMatrices]:
    """Return the adapters of experts of a checkpoint."""
    found: list[ExpertMatrices] = []
    for name in headers:
        match = _NAME.fullmatch(name)
        if match is not None and match[2]:
            under = f"{match[1]}.adapter.lora_B.experts_{match[2]}"
            ends = ("_gate", "_up") if f"{under}_gate" in headers else ("",)
            blocks = tuple(f"{under}{end}" for end in ends)
            found.append(ExpertMatrices(f"{match[1]}.{match[2]}", name, blocks))
    return found


def updates_of_run(
    base: ModelSource, adapters: ModelSource, record: Mapping[str, Any], problems: list[str]
) -> dict[str, Update]:
    """Return what a checkpoint's adapters add to the stacked weights of experts, by their names.

    Args:
        record: What the plugin has stored of its options.
        problems: Gets why an adapter does not fit.
    """
    updates: dict[str, Update] = {}
    for one in adapted_experts(adapters.headers):
        if one.weight not in base.headers:
            problems.append(f"{one.weight} is not in {base.folder}")
            continue
        a, b = adapters.headers[one.a].shape, [adapters.headers[name].shape for name in one.b]
        wanted = (*base.headers[one.weight].shape,)
        if (a[0], sum(block[1] for block in b), a[2]) != wanted:
            problems.append(
                f"{one.weight}: the adapter is {[*a]} and {[[*block] for block in b]}, the weight "
                f"{[*wanted]}"
            )
            continue
        updates[one.weight] = _update_of_run(adapters, record, one)
    return updates


def _update_of_run(adapters: ModelSource, record: Mapping[str, Any], one: ExpertMatrices) -> Update:
    def update(dtype: torch.dtype) -> tuple[Tensor, None]:
        a, b = adapters.tensor(one.a), _b(adapters, one)
        alpha = of_part(record.get("alpha_pattern", {}), "experts", one.part, record["alpha"])
        scale = scale_of(alpha, a.shape[1], rslora=record["rslora"])
        return low_rank_update(a, b, scale, dtype), None

    return update


def _b(adapters: ModelSource, one: ExpertMatrices) -> Tensor:
    return torch.cat([adapters.tensor(name) for name in one.b], dim=1)


@attrs.frozen(kw_only=True)
class PeftExperts:
    """The adapter of one stacked weight, as PEFT names it."""

    matrices: ExpertMatrices
    module: str  #: That PEFT adapts.
    parameter: str  #: In Hugging Face's model.
    rank: int

    def tensors(self, adapters: ModelSource) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """Yield the name of each matrix in PEFT's file, its header and what reads it."""
        one, headers = self.matrices, adapters.headers
        count, rank, columns = headers[one.a].shape
        rows = sum(headers[name].shape[1] for name in one.b)
        name = f"base_model.model.{self.module}.lora_"
        header = headers[one.a]
        yield (
            f"{name}A.weight",
            header.new_empty(count * rank, columns),
            lambda: stacked_a(adapters.tensor(one.a)),
        )
        yield (
            f"{name}B.weight",
            header.new_empty(rows, rank * count),
            lambda: stacked_b(_b(adapters, one)),
        )


def peft_experts(adapters: ModelSource) -> list[PeftExperts]:
    """Return the adapters of experts of a checkpoint as PEFT names them.

    Raises:
        CheckpointError: Hugging Face's model has no such experts. Lists all.
    """
    sources = parameter_sources(adapters.family, adapters.config)
    every, problems = adapted_experts(adapters.headers), []
    found = []
    for one in every:
        source = sources.get(one.weight)
        if source is None or (module := _module(source)) is None:
            problems.append(f"{one.weight}: PEFT has no name for experts of this family")
            continue
        name = _PARAMETERS[one.weight.rpartition(".")[2]]
        has_other = any(other.weight == f"{one.weight[:-1]}2" for other in every)
        is_nested = one.weight.endswith(".fc1") and has_other
        found.append(
            PeftExperts(
                matrices=one,
                module=f"{module}.base_layer" if is_nested else module,
                parameter=f"{module}.{name}",
                rank=adapters.headers[one.a].shape[1],
            )
        )
    if problems:
        raise CheckpointError(
            f"the adapters in {adapters.folder} have no form in PEFT's format; merge them with "
            "--to hf instead",
            problems,
        )
    return found


def updates_of_peft(
    source: ModelSource,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    matrix: Callable[[str, str], Tensor],
    problems: list[str],
) -> tuple[dict[str, Update], set[str]]:
    """Return what an adapter in PEFT's format adds to the stacked weights of experts, and the
    modules whose adapters these are.

    Args:
        config: PEFT's settings.
        shapes: Name in PEFT's file -> shape.
        matrix: Reads A or B of a module.
        problems: Gets why an adapter does not fit.
    """
    modules = {name: module for module, name in expert_parameters(config).items()}
    updates: dict[str, Update] = {}
    found: set[str] = set()
    for name, parameter in parameter_sources(source.family, source.config).items():
        of_all = _PARAMETERS.get(name.rpartition(".")[2])
        own = _module(parameter)
        if of_all not in modules or own is None or name not in source.headers:
            continue
        module = f"{own.removesuffix('mlp.experts')}{modules[of_all]}"
        a, b = (shapes.get(f"base_model.model.{module}.lora_{kind}.weight") for kind in "AB")
        if a is None and b is None:
            continue
        found.add(module)
        rank = rank_of({"r": None, **config}, f"{own}.{of_all}")
        count, rows, columns = source.headers[name].shape
        wanted = (count * rank, columns), (rows, rank * count)
        if (a, b) != wanted:
            problems.append(
                f"{own}.{of_all}: lora_A and lora_B are {a and [*a]} and {b and [*b]}, expected "
                f"{[*wanted[0]]} and {[*wanted[1]]}"
            )
            continue
        alpha = alpha_of(config, f"{own}.{of_all}")
        scale = scale_of(alpha, rank, rslora=bool(config.get("use_rslora")))
        updates[name] = _update_of_peft(matrix, module, count, scale)
    return updates, found


def _update_of_peft(
    matrix: Callable[[str, str], Tensor], module: str, count: int, scale: float
) -> Update:
    def update(dtype: torch.dtype) -> tuple[Tensor, None]:
        a, b = a_by_expert(matrix(module, "A"), count), b_by_expert(matrix(module, "B"), count)
        return low_rank_update(a, b, scale, dtype), None

    return update


def _module(source: ParameterSource) -> str | None:
    """Return the module of Hugging Face's model that has the experts of a stacked weight."""
    if source.form != "stack_experts":
        return None
    match = _STORED.fullmatch(source.hf_names[0])
    return None if match is None else f"{match[1]}.mlp.experts"
