"""Loss and gradients of a run's model as transformers computes them, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_run.core.hugging_face.importing import load_hf_weights
from ascend_run.core.hugging_face.parameter_rows import parameter_sources
from ascend_run.plugin_api.contracts import ModelFamily, TensorShard
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.testing.hugging_face.reference import reference_of
from ascend_run.testing.hugging_face.ties import TiesByIndex
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.exporting import export_hf
from ascend_run.types.config import RunConfig


def gradients_of(
    folder: Path,
    family: ModelFamily,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    samples: Sequence[Mapping[str, Tensor]],
) -> tuple[float, dict[str, Tensor]]:
    """Return transformers' mean loss and its gradients, by our names; 0 where there is none.

    Of experts with equal scores it selects those of lower index, as our routers do: otherwise its
    selection would be any of them.

    Args:
        folder: Empty; gets the model, and the gradients instead of weights.
        weights: Every parameter of the full model, by Megatron's name.

    Raises:
        AscendRunError: The model cannot be written, or transformers does not read it.
    """
    stored = _with_buffers(family, config, weights)
    export_hf(folder / "exported", family, config, stored.items())
    with _quiet(), TiesByIndex():
        reference = reference_of(_opened(folder / "exported"), folder, samples)
    found = {name: torch.empty_like(weight) for name, weight in stored.items()}
    shards = [
        TensorShard(key=name, tensor=x, global_shape=tuple(x.shape), offset=(0,) * x.ndim)
        for name, x in found.items()
    ]
    # The gradients were written as weights are, and are read like them: both only move rows.
    load_hf_weights(reference.gradients, family, config, shards)
    return reference.loss, {name: found[name] for name in weights}


def _with_buffers(
    family: ModelFamily, config: RunConfig, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Add the routers' biases of the choice, which start at 0 and are no parameters."""
    experts = config.model.num_moe_experts or 0
    buffers = {
        name: torch.zeros(experts, dtype=torch.float64)
        for name in parameter_sources(family, config)
        if name.endswith(".expert_bias") and name not in weights
    }
    return {**weights, **buffers}


def _opened(folder: Path) -> Any:
    """Return transformers' model of a folder, without dropout and noise.

    Raises:
        CheckpointError: transformers misses tensors, or does not know some.
    """
    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    with computing_in(torch.float64), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model, report = causal.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            pad_token_id=None,  # its row of the embedding would have no gradient
            output_loading_info=True,
        )
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others have no float64
    # DeepSeek's shared experts, where a model has none.
    empty = {name for name, tensor in model.state_dict().items() if not tensor.numel()}
    problems = [
        f"{what}: {name}" for what, names in report.items() for name in names if name not in empty
    ]
    if problems:
        raise CheckpointError("transformers does not read the model as it is exported", problems)
    model.eval()
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars and warnings of transformers."""
    from transformers.utils import logging

    log: Any = logging
    verbosity, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if has_bars:
            log.enable_progress_bar()
