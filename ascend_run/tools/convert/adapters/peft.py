"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names are those of Hugging Face's modules, ``base_model.model.MODULE.lora_A.weight`` [rank, in] and
``lora_B`` [out, rank]. Source: https://github.com/huggingface/peft, LoraConfig.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ascend_run.core.hugging_face.json_files import read_object
from ascend_run.core.hugging_face.parameter_rows import (
    RowRun,
    parameter_sources,
    row_runs,
    stored_shapes,
)
from ascend_run.ops.linear.low_rank import low_rank_update, scale_of
from ascend_run.ops.linear.peft_base import other_base
from ascend_run.ops.linear.peft_settings import (
    MAGNITUDE,
    alpha_of,
    changed_settings,
    pattern_problems,
    rank_of,
    saved_tensors,
    size_problems,
)
from ascend_run.plugin_api.error_text import show
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.model_source import ModelSource

from .expert_adapters import updates_of_peft
from .merging import Update, merged
from .saved_modules import with_saved_tensors
from .score_heads import with_own_head

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"base_model\.model\.(.+)\.(?:lora_[AB]\.weight|lora_magnitude_vector)")


def with_peft_adapter(source: ModelSource, folder: Path, stack: ExitStack) -> ModelSource:
    """Return a model with an adapter merged into it.

    Args:
        stack: Closes the adapter's file.

    Raises:
        CheckpointError: The adapter cannot be read, is more than ``B A``, or does not fit the
            model. Lists all problems.
    """
    adapter = _opened(folder, stack)
    headline = f"the adapter in {folder} cannot be merged into {source.folder}"
    if problems := [*size_problems(adapter.config), *pattern_problems(adapter.config)]:
        raise CheckpointError(headline, problems)  # without them no tensor has a size
    problems = [*adapter.problems()]
    if source.folder == source.hf_folder and (
        other := other_base(adapter.metadata, adapter.config, source.folder)
    ):
        problems.append(other)
    updates, found = updates_of_peft(
        source, adapter.config, adapter.shapes, adapter.matrix, problems
    )
    for name, parameter in parameter_sources(source.family, source.config).items():
        if not adapter.modules.intersection(map(_module, parameter.hf_names)):
            continue
        if name not in source.headers:
            continue  # reported where the model is written
        shape = tuple(source.headers[name].shape)
        try:
            every = row_runs(parameter, shape, source.config)
        except ValueError as problem:
            problems.append(f"parameter {name}: {problem}")
            continue
        runs = [run for run in every if _module(run.hf) in adapter.modules]
        found |= {_module(run.hf) for run in runs}
        problems += adapter.incompatible_tensors(runs, shape)
        updates[name] = _update(adapter, runs, shape)
    problems += [f"{module}.weight is not in the model" for module in adapter.modules - found]
    source = with_own_head(source, adapter.shapes, adapter.tensor)
    source = with_saved_tensors(source, adapter.shapes, adapter.tensor, problems)
    if problems:
        raise CheckpointError(headline, sorted(problems))
    return merged(source, updates)


@attrs.frozen
class _Adapter:
    config: Mapping[str, Any]
    file: Path
    tensors: Any
    """An open safetensors file."""
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]

    @property
    def modules(self) -> frozenset[str]:
        """The adapted modules of Hugging Face's model."""
        return frozenset(match[1] for name in self.shapes if (match := _NAME.fullmatch(name)))

    def problems(self) -> Iterator[str]:
        """Yield why it is not ``B A`` beside weights."""
        for key, neutral in changed_settings(self.config).items():
            yield f"{key} is {show(self.config[key])}; only {show(neutral)} can be merged"
        yield from (
            f"{name} is no matrix of a linear layer"
            for name in self.shapes.keys() - saved_tensors(self.shapes).keys()
            if not _is_known(name)
        )

    def incompatible_tensors(self, runs: list[RowRun], shape: tuple[int, ...]) -> Iterator[str]:
        """Yield why matrices do not fit the stored tensors of a parameter."""
        config = {"r": None, **self.config}
        transposed = bool(self.config.get("fan_in_fan_out"))
        for name, stored in stored_shapes(runs, shape).items():
            module = _module(name)
            if len(stored) != 2:
                yield f"{module} is no linear layer"
                continue
            rows, columns = stored[::-1] if runs[0].transposed else stored
            rank = rank_of(config, module)
            for part, wanted in (("A", (rank, columns)), ("B", (rows, rank))):
                found = self.shapes.get(f"base_model.model.{module}.lora_{part}.weight")
                if found != wanted:
                    shown = "missing" if found is None else [*found]
                    yield f"{module}.lora_{part} is {shown}, expected {[*wanted]}"
            magnitude = self.shapes.get(f"base_model.model.{module}.{MAGNITUDE}")
            if magnitude != ((rows,) if self.is_dora else None):
                shown = "missing" if magnitude is None else [*magnitude]
                yield (
                    f"{module}.{MAGNITUDE} is {shown}, expected "
                    f"{[rows] if self.is_dora else 'none, without use_dora'}"
                )
            if transposed is not runs[0].transposed:
                yield f"{module}: fan_in_fan_out is {transposed}, expected {not transposed}"

    def scale(self, module: str) -> float:
        rank, alpha = rank_of(self.config, module), alpha_of(self.config, module)
        return scale_of(alpha, rank, rslora=bool(self.config.get("use_rslora")))

    @property
    def is_dora(self) -> bool:
        return bool(self.config.get("use_dora"))

    def magnitude(self, module: str) -> Tensor:
        return self.tensor(f"base_model.model.{module}.{MAGNITUDE}")

    def matrix(self, module: str, part: str) -> Tensor:
        return self.tensor(f"base_model.model.{module}.lora_{part}.weight")

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of the file.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            found: Tensor = self.tensors.get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"{self.file} cannot be read: {problem}") from None
        return found


def _opened(folder: Path, stack: ExitStack) -> _Adapter:
    if not folder.is_dir():
        raise CheckpointError(f"no folder at {folder}; --adapter names a folder in PEFT's format")
    if not (folder / TENSORS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = "; adapter_model.bin is a pickle: save it as safetensors" if pickled else ""
        raise CheckpointError(f"{folder} has no {TENSORS}{hint}")
    config = read_object(folder / CONFIG)
    try:
        tensors = stack.enter_context(safe_open(folder / TENSORS, framework="pt"))
        names = [*tensors.keys()]
        metadata = tensors.metadata() or {}
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{folder / TENSORS} cannot be read: {problem}") from None
    return _Adapter(config, folder / TENSORS, tensors, shapes, metadata)


def _update(adapter: _Adapter, runs: list[RowRun], shape: tuple[int, ...]) -> Update:
    def update(dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        result = torch.zeros(shape, dtype=dtype)
        magnitudes = torch.zeros(shape[:-1], dtype=dtype) if adapter.is_dora else None
        for run in runs:
            module = _module(run.hf)
            a, b = (adapter.matrix(module, part) for part in "AB")
            scale = adapter.scale(module)
            b_of_run = b[run.hf_start : run.hf_start + run.rows]
            rows = result if run.expert is None else result[run.expert]
            rows[run.start : run.start + run.rows] = low_rank_update(a, b_of_run, scale, dtype)
            if magnitudes is not None:
                into = magnitudes if run.expert is None else magnitudes[run.expert]
                stored = adapter.magnitude(module)[run.hf_start : run.hf_start + run.rows]
                into[run.start : run.start + run.rows] = stored
        return result, magnitudes

    return update


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_known(name: str) -> bool:
    return _NAME.fullmatch(name) is not None
