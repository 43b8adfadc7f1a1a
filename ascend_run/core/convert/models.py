"""A built model and a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ascend_run.core.model.initialization import named_parameters
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ModelBundle, ModelFamily

from .importing import load_hf_weights
from .local_pieces import Coordinates, local_pieces


def load_model(
    folder: str | Path, family: ModelFamily, config: RunConfig, bundle: ModelBundle, groups: Any
) -> None:
    """Replace this rank's initial weights by those of a Hugging Face folder.

    Call it on every rank, after the model is built and before data parallelism takes its
    parameters over and before the optimizer copies them.

    Args:
        groups: Megatron's ProcessGroupCollection; only ranks and sizes are read.

    Raises:
        CheckpointError: See ``load_hf_weights``; the weights are untouched then.
    """
    rank = Coordinates(
        tp_rank=groups.tp.rank(),
        tp_size=groups.tp.size(),
        ep_rank=groups.ep.rank(),
        ep_size=groups.ep.size(),
    )
    load_hf_weights(
        folder, family, config, local_pieces(_parameters(bundle), family, config, rank)
    )


def _parameters(bundle: ModelBundle) -> Iterator[tuple[str, Tensor]]:
    for chunk in bundle.chunks:
        yield from named_parameters(chunk)
