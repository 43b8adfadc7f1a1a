"""Build a stored model on one rank, as a run builds it from its config, and fill it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.plugin_api.manifest import EnabledPlugin
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.convert.formats.model_source import ModelSource

if TYPE_CHECKING:
    from ascend_run.core.model.gpt import GPT


@contextmanager
def built_model(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    refusal: str,
    plugins: Sequence[EnabledPlugin] = (),
) -> Iterator[GPT]:
    """Build and fill a model, in evaluation and without gradients; everything is undone on exit.

    Args:
        refusal: Headline of the error if no run can have this model.
        plugins: Instances that are added as the innermost ones.

    Raises:
        ConfigError: No run can have this model.
    """
    with warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.simplefilter("ignore")
        from ascend_run.core.hooks import Hooks
        from ascend_run.core.log.setup import configure_logging
        from ascend_run.core.model.build import build_model
        from ascend_run.core.model.initialization import global_name, named_parameters
        from ascend_run.core.run import prepared_rank
        from ascend_run.core.train.seeding import seed_everything

        prepared = prepared_model(source, refusal)
        with (
            configure_logging(None, level="warning"),  # what a run chooses is no output of a tool
            prepared_rank(prepared.run_request()) as (hooks, context),
            torch.no_grad(),
        ):
            seed_everything(context.config, context.layout)
            hooks = Hooks([*plugins, *hooks.plugins])
            bundle = build_model(context.config, hooks, context.groups, context.device, dtype=dtype)
            (model,) = bundle.chunks
            # of buffers, those that are stored, such as a router's bias of its experts
            buffers = ((global_name(name, model), held) for name, held in model.named_buffers())
            stored = ((name, held) for name, held in buffers if name in source.headers)
            for name, held in (*named_parameters(model), *stored):
                tensor = source.tensor(name)
                held[: len(tensor)].copy_(tensor)
            model.eval()
            yield cast("GPT", model)


def prepared_model(source: ModelSource, refusal: str) -> PreparedRun:
    """Prepare a run of the model on one rank.

    Args:
        refusal: Headline of the error.

    Raises:
        ConfigError: No run can have this model.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(source.config_toml, "utf-8")
        words = [
            'data.train=["none"]',
            "train.precision=fp32",
            "run.nproc=1",
            f"run.output_dir={folder}/run",
            f"data.seq_length={row_length(source)}",
        ]
        try:
            return prepare_raw(read_raw(file, words), world_size=1)
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
