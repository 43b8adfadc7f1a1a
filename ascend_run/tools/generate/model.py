"""A stored model on this rank that computes steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.engine import Engine
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Step
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.building import built_model, compute_dtype
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.opening import open_model, recognised
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.types.config import RunConfig

from .hooks import GenerationHooks
from .lean import LeanModel

if TYPE_CHECKING:
    from ascend_run.core.model.gpt import GPT

# T tokens of a step, R rows whose logits are wanted, V vocabulary

_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")
"""Scalings by which the length of a sequence changes the angles of all its tokens."""


@attrs.frozen(kw_only=True, eq=False)
class GenerationModel:
    """A filled model."""

    config: RunConfig
    max_length: int  #: Longest sequence, prompt and new tokens.
    _chunk: GPT
    _forward: CachedForward
    _lean: LeanModel
    _tables: Tensor | None
    """Rotary tables of all positions; None: the model has none."""

    def logits(self, step: Step) -> Tensor:
        """Compute a step: the logits [R, V] of its wanted rows."""
        tables = self._tables
        if tables is not None:
            tables = tables.index_select(-2, step.positions_T)
        with self._forward.running(step):
            tokens_1T, positions_1T = step.tokens_T[None], step.positions_T[None]
            logits_1RV: Tensor = self._chunk(tokens_1T, positions_1T, rotary_pos_emb=tables)
        return logits_1RV[0]

    def with_cache(self, num_tokens: int) -> KeyValueCache:
        """Give the model a new cache of so many tokens, which ``logits`` reads and writes."""
        self._forward.cache = KeyValueCache(num_tokens)
        return self._forward.cache

    def engine(self, num_tokens: int, *, max_sequences: int = 16) -> Engine:
        """Return an engine on a new cache of so many tokens."""
        cache = self.with_cache(num_tokens)
        return Engine(self.logits, cache, max_sequences=max_sequences)


@contextmanager
def loaded_model(
    path: Path, options: SourceOptions, dtype: torch.dtype | None = None
) -> Iterator[GenerationModel]:
    """Open, build and fill a model on this rank; everything is undone on exit.

    Args:
        dtype: Default: float32, or float64 of such weights.

    Raises:
        AscendRunError: It cannot be read or built; it has a score head; its RoPE depends on the
            length; or its weights exceed the free memory.
    """
    with ExitStack() as stack:
        source = open_model(path, recognised(path, options.step), options, stack)
        dtype = dtype or compute_dtype(source)
        _require_generating(source, dtype)
        forward = CachedForward()
        refusal = f"the model of {source.folder} cannot be built to generate"
        lean = LeanModel(forward)
        plugins = [GenerationHooks(forward, lean)]
        chunk = stack.enter_context(built_model(source, dtype, refusal=refusal, plugins=plugins))
        lean.prepare(chunk)
        config = source.config
        max_length: int = config.model.max_position_embeddings or config.data.seq_length
        tables = None
        if chunk.rotary is not None:
            tables = chunk.rotary(max_length, dtype, torch.device("cpu"))
        yield GenerationModel(
            config=config,
            max_length=max_length,
            chunk=chunk,
            forward=forward,
            lean=lean,
            tables=tables,
        )


def _require_generating(source: ModelSource, dtype: torch.dtype) -> None:
    """
    Raises:
        ConfigError: The model cannot continue text, or exceeds the free memory; lists all.
    """
    import psutil

    model, problems = source.config.model, []
    if model.num_labels:
        problems.append(
            f"it has a score head (model.num_labels={model.num_labels}) and predicts no tokens"
        )
    if model.rope_scaling_type in _LENGTH_DEPENDENT:
        problems.append(
            f"its RoPE scaling {model.rope_scaling_type} depends on the length of each sequence, "
            "which is not supported yet"
        )
    needed = sum(header.numel() * dtype.itemsize for header in source.headers.values())
    if needed > (free := psutil.virtual_memory().available):
        problems.append(
            f"its weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and "
            f"{free / 1e9:.1f} GB are free; a narrower --dtype takes less"
        )
    if problems:
        raise ConfigError(f"{source.folder} cannot generate", problems)
