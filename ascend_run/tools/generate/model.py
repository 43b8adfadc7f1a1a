"""A stored model on this rank that computes steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.engine import Engine
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.positions import RotaryPositions
from ascend_run.ops.generation.step import Step
from ascend_run.ops.generation.text_lengths import TextLengths
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.building import built_bundle, compute_dtype, prepared_model
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.opening import open_model, recognised
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.types.config import RunConfig

from .hooks import GenerationHooks
from .latents import LatentModel
from .lean import LeanModel
from .lengths import text_lengths
from .memory import memory_problems
from .model_options import ModelOptions
from .plan_message import send_plan
from .ranks import Leader, follow
from .stage import Stage

# T tokens of a step, R rows whose logits are wanted, V vocabulary


@attrs.frozen(kw_only=True, eq=False)
class GenerationModel:
    """A filled model."""

    config: RunConfig
    lengths: TextLengths
    _stage: Stage
    _leader: Leader | None
    """Of several ranks: what computes on all of them."""

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and new tokens."""
        return self.lengths.longest

    def logits(self, step: Step) -> Tensor:
        """Compute a step: the logits [R, V] of its wanted rows."""
        if self._leader is not None:
            return self._leader.logits(step)
        logits_RV = self._stage.logits(step)
        assert logits_RV is not None, "one rank has the last stage"
        return logits_RV

    def with_cache(self, num_tokens: int) -> KeyValueCache:
        """Give the model a new cache of so many tokens, which ``logits`` reads and writes."""
        if self._leader is not None:
            return self._leader.with_cache(num_tokens)
        self._stage.forward.cache = KeyValueCache(num_tokens)
        return self._stage.forward.cache

    def engine(self, num_tokens: int, *, max_sequences: int = 16) -> Engine:
        """Return an engine on a new cache of so many tokens."""
        cache = self.with_cache(num_tokens)
        return Engine(
            self.logits,
            cache,
            max_sequences=max_sequences,
            restarts_above=self.lengths.restarts_above,
            have_same_keys=self.lengths.have_same_keys,
        )


@contextmanager
def loaded_model(
    path: Path,
    options: SourceOptions,
    dtype: torch.dtype | None = None,
    model_options: ModelOptions | None = None,
    cache_tokens: Callable[[int], int] = lambda longest: 0,
) -> Iterator[GenerationModel]:
    """Open, build and fill a model; everything is undone on exit.

    On several ranks it is called on rank 0, and ``follow_model`` on the others.

    Args:
        dtype: Default: float32, or float64 of such weights.
        cache_tokens: Longest text of the model -> tokens of the cache that it will be given; called
            before the build, so that what cannot fit is refused.

    Raises:
        AscendRunError: It cannot be read or built; it has a score head; or its weights and the
            cache exceed the free memory.
    """
    model_options = model_options or ModelOptions()
    with _stage(path, options, dtype, model_options, cache_tokens) as (stage, lengths):
        several = stage.context.layout.world_size > 1
        yield GenerationModel(
            config=stage.context.config,
            lengths=lengths,
            stage=stage,
            leader=Leader(stage) if several else None,
        )
        if several:
            send_plan(None)


def follow_model(
    path: Path, options: SourceOptions, dtype: torch.dtype | None, model_options: ModelOptions
) -> None:
    """Build this rank's part of a model, and compute what rank 0 asks for until it ends.

    Raises:
        AscendRunError: See ``loaded_model``.
    """
    with _stage(path, options, dtype, model_options, lambda longest: 0) as (stage, _):
        follow(stage)


@contextmanager
def _stage(
    path: Path,
    options: SourceOptions,
    dtype: torch.dtype | None,
    model_options: ModelOptions,
    cache_tokens: Callable[[int], int],
) -> Iterator[tuple[Stage, TextLengths]]:
    with ExitStack() as stack:
        source = open_model(path, recognised(path, options.step), options, stack)
        dtype = dtype or compute_dtype(source)
        lengths = text_lengths(source.config, model_options.rope_length)
        _require_generating(source, dtype, cache_tokens(lengths.longest), model_options)
        forward = CachedForward()
        lean, latents = LeanModel(forward), LatentModel(forward)
        bundle, context = stack.enter_context(
            built_bundle(
                source,
                dtype,
                plugins=[GenerationHooks(forward, lean, latents)],
                **_layout(source, model_options),
            )
        )
        stage = Stage(bundle, context, forward, lean, latents)
        latents.prepare(lean.weights)
        lean.prepare(stage.chunk, read={*latents.linears()})
        if (rotary := stage.chunk.rotary) is not None:
            stage.positions = RotaryPositions(rotary.at, lengths, dtype, torch.device("cpu"))
        yield stage, lengths


def require_layout(path: Path, options: SourceOptions, model_options: ModelOptions) -> None:
    """Refuse ranks that no run can have this model on, before they are started.

    Raises:
        AscendRunError: It cannot be read, or split so; lists all.
    """
    with ExitStack() as stack:
        source = open_model(path, recognised(path, options.step), options, stack)
        prepared_model(source, **_layout(source, model_options))


def _layout(source: ModelSource, options: ModelOptions) -> dict[str, Any]:
    """Return how a run of the model is prepared."""
    words = f" with {options.words}" if options.words else ""
    return {
        "refusal": f"the model of {source.folder} cannot be built to generate{words}",
        "world_size": options.world_size,
        "layout": options.layout(experts=bool(source.config.model.num_moe_experts)),
    }


def _require_generating(
    source: ModelSource, dtype: torch.dtype, cache_tokens: int, options: ModelOptions
) -> None:
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
    problems += memory_problems(source, dtype, cache_tokens, free_bytes, options)
    if problems:
        raise ConfigError(f"{source.folder} cannot generate", problems)
