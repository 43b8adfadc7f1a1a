"""The adapters of a run as the matrices of a folder in PEFT's format, by their names there.

PEFT adapts Hugging Face's linear layers, one A and one B each. Ours adapt the parts of Megatron's
linear layers, so each part must be a linear layer of its own there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import (
    ParameterSource,
    RowRun,
    parameter_sources,
    row_runs,
)
from ascend_run.ops.linear.peft_settings import MAGNITUDE
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.model_source import ModelSource

from .run_adapters import adapted_parts, in_megatrons_order, kind_of


@attrs.frozen(kw_only=True)
class PeftModule:
    """A linear layer of Hugging Face's model and the adapter of a run that belongs to it."""

    module: str
    transposed: bool
    """Whether its weight is stored transposed, as in GPT-2's Conv1D."""
    linear: str
    part: str
    start: int
    """Its first row in the linear's ``lora_A``."""
    rank: int
    rows: Tensor
    """Rows of the part's ``lora_B`` in the order of the module."""


def peft_modules(adapters: ModelSource) -> list[PeftModule]:
    """Find the module of each adapter of a checkpoint.

    Raises:
        CheckpointError: An adapter has no module of its own. Lists all.
    """
    sources = parameter_sources(adapters.family, adapters.config)
    modules: list[PeftModule] = []
    problems: dict[str, None] = {}
    for linear, parts in adapted_parts(adapters.headers).items():
        source = sources.get(f"{linear}.weight")
        if source is None:
            problems[f"{linear} is no linear layer of a {adapters.family.architecture}"] = None
            continue
        found = [*_of_linear(adapters, linear, parts, source)]
        modules += found
        missing = [part for part in parts if part not in {one.part for one in found}]
        if missing:
            names = sorted({name.removesuffix(".weight") for name in source.hf_names})
            problems[
                f"{', '.join(missing)} of {linear}: not a linear layer of its own in "
                f"{', '.join(names)}"
            ] = None
    if len({one.transposed for one in modules}) > 1:
        problems["some of the weights are stored transposed; PEFT has one setting for all"] = None
    if problems:
        raise CheckpointError(
            f"the adapters in {adapters.folder} have no form in PEFT's format; merge them with "
            "--to hf instead",
            [*problems],
        )
    return modules


def peft_tensors(
    adapters: ModelSource, modules: Sequence[PeftModule]
) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
    """Return the headers of the matrices by PEFT's names, and what reads each."""
    headers: dict[str, Tensor] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    for one in modules:
        under = f"{one.linear}.adapter.lora_"
        a, b = adapters.headers[f"{under}A"], adapters.headers[f"{under}B.{one.part}"]
        name = f"base_model.model.{one.module}.lora_"
        headers[f"{name}A.weight"] = a.new_empty(one.rank, a.shape[1])
        headers[f"{name}B.weight"] = b.new_empty(b.shape)
        if (magnitude := adapters.headers.get(f"{under}magnitude.{one.part}")) is not None:
            vector = f"base_model.model.{one.module}.{MAGNITUDE}"
            headers[vector] = magnitude.new_empty(magnitude.shape)
            readers[vector] = _reader_of_rows(adapters, one, "magnitude")
        readers[f"{name}A.weight"] = _reader_of_a(adapters, one)
        readers[f"{name}B.weight"] = _reader_of_rows(adapters, one, "B")
    return headers, readers


def _reader_of_a(adapters: ModelSource, one: PeftModule) -> Callable[[], Tensor]:
    def read() -> Tensor:
        whole = adapters.tensor(f"{one.linear}.adapter.lora_A")
        return whole[one.start : one.start + one.rank]

    return read


def _reader_of_rows(adapters: ModelSource, one: PeftModule, kind: str) -> Callable[[], Tensor]:
    return lambda: adapters.tensor(f"{one.linear}.adapter.lora_{kind}.{one.part}")[one.rows]


def _of_linear(
    adapters: ModelSource, linear: str, parts: Sequence[str], source: ParameterSource
) -> Iterator[PeftModule]:
    """Yield the modules of the parts that are one."""
    kind = kind_of(linear)
    columns = adapters.headers[f"{linear}.adapter.lora_A"].shape[1]
    end = 0
    for part in parts:
        b = adapters.headers[f"{linear}.adapter.lora_B.{part}"]
        start, end = end, end + b.shape[1]
        # Row of the part, from 1, by row of the weight; 0: a row of another part.
        numbers = torch.arange(1, len(b) + 1)[:, None]
        numbers = in_megatrons_order(kind, {part: numbers}, adapters.config)[:, 0]
        runs = row_runs(source, (len(numbers), columns), adapters.config)
        if (own := _own_module(numbers, runs)) is not None:
            yield PeftModule(
                module=own[0].removesuffix(".weight"),
                transposed=source.transposed,
                linear=linear,
                part=part,
                start=start,
                rank=b.shape[1],
                rows=own[1],
            )


def _own_module(numbers: Tensor, runs: Sequence[RowRun]) -> tuple[str, Tensor] | None:
    """Return the stored tensor with the rows of a part alone and their order; None: none has."""
    sizes = Counter[str]()
    for run in runs:
        sizes[run.hf] += run.rows
    named = {run.hf for run in runs if numbers[run.start : run.start + run.rows].any()}
    if len(named) != 1 or sizes[name := named.pop()] != int((numbers > 0).sum()):
        return None
    rows = torch.zeros(sizes[name], dtype=torch.long)
    for run in runs:
        if run.hf == name:
            rows[run.stored(run.start, run.start + run.rows)] = numbers[
                run.start : run.start + run.rows
            ]
    return name, rows - 1
