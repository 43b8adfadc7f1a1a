"""Jobs for the pool: a model on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.generation.engine import Request
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.ops.linear.packed_linear import DTYPES, unavailable
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import GenerationModel, follow_model, loaded_model
from ascend_run.tools.generate.model_options import ModelOptions
from tests.support.small_runs import rank_environment

from .test_logits import logits_in_chunks, logits_of_new

Found = tuple[list[Tensor], list[tuple[list[int], Tensor]], list[tuple[int, int, float | None]]]
SAMPLING = Sampling(temperature=1.5, top_p=0.9, seed=3, logprobs=0)


def on_ranks(
    folder: str,
    family: str,
    options: ModelOptions,
    batches: Sequence[Sequence[Sequence[int]]],
    dtype: torch.dtype,
) -> list[Found] | None:
    """Return what ``found_by`` does for each batch, on rank 0."""
    source = SourceOptions(family=family)
    with rank_environment():
        if dist.get_rank() > 0:
            follow_model(Path(folder), source, dtype, options)
            return None
        with loaded_model(Path(folder), source, dtype, options) as model:
            lean, config = model._stage.lean, model.config
            packs = dtype in DTYPES and not config.parallel.sequence_parallel
            packed = any(weight.packed is not None for weight in lean.weights.values())
            assert packed == (packs and unavailable(dtype) is None)
            is_latent = bool(config.model.multi_latent_attention)
            assert bool(lean.layers) == (not is_latent and not config.parallel.sequence_parallel)
            assert bool(model._stage.latents.layers) == is_latent
            return [found_by(model, batch) for batch in batches]


def found_by(model: GenerationModel, batch: Sequence[Sequence[int]]) -> Found:
    """Return the logits of sequences in chunks, the answers to their first tokens, and drawn
    tokens with their log-probabilities."""
    prompts = [ids[:6] for ids in batch]
    chunks, new = logits_in_chunks(model, batch, 3), logits_of_new(model, prompts, 5)
    engine = model.engine(128)
    for ids in prompts:
        engine.submit(Request(prompt=tuple(ids), max_new_tokens=5, sampling=SAMPLING))
    drawn = [one for _ in range(5) for one in engine.step()]
    return chunks, new, [(one.sequence, one.token, one.logprob) for one in drawn]


def cancelled_on_ranks(folder: str, options: ModelOptions) -> tuple[list[int], list[int]] | None:
    """Return the tokens of a prompt in place of a cancelled one, and alone."""
    with rank_environment():
        if dist.get_rank() > 0:
            follow_model(Path(folder), SourceOptions(), torch.float64, options)
            return None
        with loaded_model(Path(folder), SourceOptions(), torch.float64, options) as model:
            engine = model.engine(32)
            first = engine.submit(Request(prompt=(5,) * 20, max_new_tokens=12))
            engine.step()
            engine.step()
            engine.cancel(first)
            second = engine.submit(Request(prompt=(7, 8, 9), max_new_tokens=6))
            after = [one for _ in range(6) for one in engine.step()]
            assert {one.sequence for one in after} == {second}
            assert engine.is_idle
            engine = model.engine(32)
            engine.submit(Request(prompt=(7, 8, 9), max_new_tokens=6))
            alone = [one.token for _ in range(6) for one in engine.step()]
            return [one.token for one in after], alone


def resumed_on_ranks(folder: str, options: ModelOptions) -> tuple[list[int], list[int]] | None:
    """Return the tokens of a sequence that is resumed, with more pages, and those of a new one."""
    with rank_environment():
        if dist.get_rank() > 0:
            follow_model(Path(folder), SourceOptions(), torch.float64, options)
            return None
        with loaded_model(Path(folder), SourceOptions(), torch.float64, options) as model:
            engine = model.engine(64)
            first = engine.submit(Request(prompt=(5,) * 9, max_new_tokens=4, is_kept=True))
            text = [5] * 9 + [one.token for _ in range(4) for one in engine.step()]
            request = Request(prompt=(*text[:11], 7, 8), max_new_tokens=9, is_kept=True)
            engine.resume(first, request)
            after = [one.token for _ in range(9) for one in engine.step()]
            assert engine.num_cached(first) == 11
            engine = model.engine(64)
            engine.submit(request)
            return after, [one.token for _ in range(9) for one in engine.step()]
