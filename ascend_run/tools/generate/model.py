"""A stored model on this rank that computes steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.engine import Engine
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.positions import RotaryPositions, TextLengths
from ascend_run.ops.generation.step import Step
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.building import built_model, compute_dtype
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.opening import open_model, recognised
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.types.config import RunConfig

from .hooks import GenerationHooks
from .lean import LeanModel
from .lengths import text_lengths
from .memory import memory_problems
from .model_options import ModelOptions

if TYPE_CHECKING:
    from ascend_run.core.model.gpt import GPT

# T tokens of a step, R rows whose logits are wanted, V vocabulary


@attrs.frozen(kw_only=True, eq=False)
class GenerationModel:
    """A filled model."""

    config: RunConfig
    lengths: TextLengths
    _chunk: GPT
    _forward: CachedForward
    _lean: LeanModel
    _positions: RotaryPositions | None  #: None: the model has no rotary positions.

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and new tokens."""
        return self.lengths.longest

    def logits(self, step: Step) -> Tensor:
        """Compute a step: the logits [R, V] of its wanted rows."""
        tables = None if self._positions is None else self._positions.tables(step)
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
        return Engine(
            self.logits,
            cache,
            max_sequences=max_sequences,
            restarts_above=self.lengths.restarts_above,
        )


@contextmanager
def loaded_model(
    path: Path,
    options: SourceOptions,
    dtype: torch.dtype | None = None,
    model_options: ModelOptions | None = None,
    cache_tokens: Callable[[int], int] = lambda longest: 0,
) -> Iterator[GenerationModel]:
    """Open, build and fill a model on this rank; everything is undone on exit.

    Args:
        dtype: Default: float32, or float64 of such weights.
        cache_tokens: Longest text of the model -> tokens of the cache that it will be given; told
            before the build, so that what cannot fit is refused.

    Raises:
        AscendRunError: It cannot be read or built; it has a score head; or its weights and the
            cache exceed the free memory.
    """
    with ExitStack() as stack:
        source = open_model(path, recognised(path, options.step), options, stack)
        dtype = dtype or compute_dtype(source)
        lengths = text_lengths(source.config, (model_options or ModelOptions()).rope_length)
        _require_generating(source, dtype, cache_tokens(lengths.longest))
        forward = CachedForward()
        refusal = f"the model of {source.folder} cannot be built to generate"
        lean = LeanModel(forward)
        plugins = [GenerationHooks(forward, lean)]
        chunk = stack.enter_context(built_model(source, dtype, refusal=refusal, plugins=plugins))
        lean.prepare(chunk)
        positions = None
        if (rotary := chunk.rotary) is not None:
            positions = RotaryPositions(rotary.at, lengths, dtype, torch.device("cpu"))
        yield GenerationModel(
            config=source.config,
            lengths=lengths,
            chunk=chunk,
            forward=forward,
            lean=lean,
            positions=positions,
        )


def _require_generating(source: ModelSource, dtype: torch.dtype, cache_tokens: int) -> None:
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
    free_bytes = psutil.virtual_memory().available
    problems += memory_problems(source, dtype, cache_tokens, free_bytes)
    if problems:
        raise ConfigError(f"{source.folder} cannot generate", problems)
