"""Modules that were trained in full beside adapters: PEFT's ``modules_to_save``.

In a run's checkpoint they stand by their parameters' names, in a folder in PEFT's format as
``base_model.model.MODULE.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.config.vocabulary import has_tied_output
from ascend_run.core.hugging_face.parameter_rows import (
    EMBEDDING,
    parameter_sources,
    row_runs,
    stored_shapes,
    tied_copy,
)
from ascend_run.ops.linear.peft_settings import is_saved, saved_tensors, untied
from ascend_run.tools.convert.formats.model_source import ModelSource

_PREFIX: Final = "base_model.model."
_LAYER: Final = re.compile(r"model\.layers\.\d+\.")
_RENAMED: Final = (".block_sparse_moe.", ".mlp.")
"""Part of a stored tensor's name, and of its module's, of a Mixtral."""


def with_saved_parameters(base: ModelSource, run: ModelSource, names: Iterable[str]) -> ModelSource:
    """Return the base with the parameters that a run has stored in full."""
    own = {name: run.headers[name] for name in names}

    def read(name: str) -> Tensor:
        return run.tensor(name) if name in own else base.tensor(name)

    return attrs.evolve(base, headers={**base.headers, **own}, read=read)


def with_saved_tensors(
    source: ModelSource,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Callable[[str], Tensor],
    problems: list[str],
) -> ModelSource:
    """Return a model with the modules that PEFT has saved in full.

    Args:
        shapes: Name in PEFT's file -> shape.
        stored: Reads a tensor of the file.
        problems: Is extended by the tensors that do not fit.
    """
    ours = {theirs: name for name, theirs in saved_tensors(shapes).items()}
    found: dict[str, dict[str, str]] = {}
    for name, parameter in parameter_sources(source.family, source.config).items():
        names = {hf: ours[as_module(hf)] for hf in parameter.hf_names if as_module(hf) in ours}
        if names and name in source.headers:
            found[name] = names
            runs = row_runs(parameter, source.headers[name].shape, source.config)
            wanted = stored_shapes(runs, source.headers[name].shape)
            problems += [
                f"{file} is {[*shapes[file]]}, expected {[*wanted[hf]]}"
                for hf, file in names.items()
                if shapes[file] != wanted[hf]
            ]
    known = {file for names in found.values() for file in names.values()}
    for copy in _copies(source):
        its = [*found.get(EMBEDDING, {}).values(), *([ours[copy]] if copy in ours else [])]
        known |= {*its}
        if its and (len(its) == 1 or not torch.equal(*map(stored, its))):
            problems.append(untied("the embedding", copy.removesuffix(".weight")))
    problems += [f"{name} is not in the model" for name in sorted({*ours.values()} - known)]

    def read(name: str) -> Tensor:
        tensor = source.tensor(name)
        if name not in found:
            return tensor
        tensor = tensor.clone()
        parameter = parameter_sources(source.family, source.config)[name]
        for run in row_runs(parameter, tensor.shape, source.config):
            if run.hf in found[name]:
                theirs = stored(found[name][run.hf])
                rows = slice(run.start, run.start + run.rows)
                tensor[rows] = theirs[run.stored(rows.start, rows.stop)].to(tensor.dtype)
        return tensor

    return attrs.evolve(source, read=read)


def saved_parameters(run: ModelSource, modules: Collection[str]) -> dict[str, list[str]]:
    """Map the parameters of a run's modules that were trained in full to PEFT's names; a tied
    embedding has two."""
    sources = parameter_sources(run.family, run.config)
    names: dict[str, list[str]] = {}
    for name in run.headers:
        if name in sources and is_saved(name, modules):
            hf = [as_module(sources[name].hf_names[0])]
            if name == EMBEDDING:
                hf += _copies(run)
            names[name] = [_PREFIX + each for each in hf]
    return names


def peft_readers(
    run: ModelSource, modules: Collection[str]
) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
    """Yield (PEFT's name, header, what reads it) of the modules that were trained in full."""
    rows = run.config.model.vocab_size
    for name, theirs in saved_parameters(run, modules).items():
        header = run.headers[name]
        is_vocabulary = name.rpartition(".")[0] in ("embedding.word_embeddings", "output_layer")
        shape = (rows if is_vocabulary else header.shape[0], *header.shape[1:])
        for each in theirs:
            meta = torch.empty(shape, dtype=header.dtype, device="meta")
            yield each, meta, _reader(run, name, shape[0])


def modules_to_save(run: ModelSource, names: Collection[str]) -> dict[str, object]:
    """Return PEFT's settings of modules, by the names of their tensors in its file."""
    copies = {_PREFIX + copy for copy in _copies(run)}
    modules = (
        name.removeprefix(_PREFIX).rpartition(".")[0] for name in names if name not in copies
    )
    ends = {_LAYER.sub("", name) for name in modules}
    return {
        "ensure_weight_tying": not copies.isdisjoint(names),
        "modules_to_save": sorted(ends) or None,
    }


def as_module(hf: str) -> str:
    """Return the name of a stored tensor by its module in Hugging Face's model."""
    return hf.replace(*_RENAMED)


def _copies(source: ModelSource) -> list[str]:
    """Return the name under which PEFT's files have a tied embedding once more."""
    tied = has_tied_output(source.config.model)
    return [tied_copy(source.family)[0]] if tied else []


def _reader(run: ModelSource, name: str, rows: int) -> Callable[[], Tensor]:
    return lambda: run.tensor(name)[:rows]
