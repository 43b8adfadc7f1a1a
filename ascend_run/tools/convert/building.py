"""Build a stored model, as a run builds it from its config, and fill it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import attrs
import torch

from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.plugin_api.manifest import EnabledPlugin
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.convert.formats.model_source import ModelSource

if TYPE_CHECKING:
    from ascend_run.core.model.gpt import GPT
    from ascend_run.plugin_api.contracts import ModelBundle, RunContext

_PREFIX: Final = "model/"
"""Of the keys of a model's shards."""


@contextmanager
def built_model(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    refusal: str,
    plugins: Sequence[EnabledPlugin] = (),
) -> Iterator[GPT]:
    """Build and fill a model on one rank; see ``built_bundle``."""
    with built_bundle(source, dtype, refusal=refusal, plugins=plugins) as (bundle, _):
        (model,) = bundle.chunks
        yield cast("GPT", model)


@contextmanager
def built_bundle(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    refusal: str,
    plugins: Sequence[EnabledPlugin] = (),
    world_size: int = 1,
    layout: Sequence[str] = (),
) -> Iterator[tuple[ModelBundle, RunContext]]:
    """Build and fill this rank's part of a model, in evaluation and without gradients; everything
    is undone on exit.

    Args:
        refusal: Headline of the error if no run can have this model.
        plugins: Instances that are added as the innermost ones.
        layout: Config overrides.

    Raises:
        ConfigError: No run can have this model.
    """
    with warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.simplefilter("ignore")
        from ascend_run.core.hooks import Hooks
        from ascend_run.core.log.setup import configure_logging
        from ascend_run.core.model.build import build_model
        from ascend_run.core.run import prepared_rank
        from ascend_run.core.train.seeding import seed_everything

        prepared = prepared_model(source, refusal, world_size, layout)
        with (
            configure_logging(None, level="warning"),  # what a run chooses is no output of a tool
            prepared_rank(prepared.run_request()) as (hooks, context),
            torch.no_grad(),
        ):
            seed_everything(context.config, context.layout)
            hooks = Hooks([*plugins, *hooks.plugins])
            bundle = build_model(context.config, hooks, context.groups, context.device, dtype=dtype)
            _fill(source, bundle)
            for chunk in bundle.chunks:
                chunk.eval()
            yield bundle, context


def _fill(source: ModelSource, bundle: ModelBundle) -> None:
    """Copy this rank's shards of every parameter and persistent buffer."""
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
    from ascend_run.ops.linear.stored_weight import filled

    vocab_size = source.config.model.vocab_size
    for held in sharded_tensors(bundle.chunks, vocab_size=vocab_size, stored=True):
        with filled(held.tensor) as values:
            key, tensor = "", None
            for shard in model_shards([attrs.evolve(held, tensor=values)]):
                if tensor is None or key != shard.key:
                    key = shard.key
                    tensor = source.tensor(key.removeprefix(_PREFIX))
                ends = zip(shard.offset, shard.tensor.shape, strict=True)
                shard.tensor.copy_(tensor[tuple(slice(at, at + size) for at, size in ends)])


def prepared_model(
    source: ModelSource, refusal: str, world_size: int = 1, layout: Sequence[str] = ()
) -> PreparedRun:
    """Prepare a run of the model.

    Args:
        refusal: Headline of the error.
        layout: Config overrides.

    Raises:
        ConfigError: No run can have this model.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(source.config_toml, "utf-8")
        words = [
            'data.train=["none"]',
            "train.precision=fp32",
            f"run.nproc={world_size}",
            f"run.output_dir={folder}/run",
            "train.micro_batch_size=1",
            f"train.global_batch_size={world_size}",
            f"data.seq_length={row_length(source)}",
            *layout,
        ]
        try:
            return prepare_raw(read_raw(file, words), world_size=world_size)
        except AscendRunError as problem:
            raise ConfigError(refusal, problem.problems or (problem.headline,)) from None


def compute_dtype(source: ModelSource) -> torch.dtype:
    """Return float32, or float64 of such weights."""
    is_double = any(header.dtype is torch.float64 for header in source.headers.values())
    return torch.float64 if is_double else torch.float32


def row_length(source: ModelSource) -> int:
    """Return a sequence length that the model's positions allow."""
    length: int = source.config.data.seq_length
    return min(length, source.config.model.max_position_embeddings or length)
