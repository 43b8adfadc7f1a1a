"""Compare the logits of two stored models on the same tokens.

Each model is built as a run builds it, from its own config, on the CPU in float32 (float64 for such
weights), one after the other.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugin_api.errors import AscendRunError, ConfigError
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.convert.differences import Difference, difference
from ascend_run.tools.convert.formats.model_source import ModelSource, Progress

from .comparison import Comparison

SEQUENCES: Final = 2
MAX_LENGTH: Final = 128
_SEED: Final = 1234
_ADVICE: Final = "compare the tensors instead, with --verify tensors"


def require_buildable(source: ModelSource) -> None:
    """
    Raises:
        ConfigError: No run can have this model, or it is larger than the free memory.
    """
    import psutil

    _prepared(source)
    width = compute_dtype(source).itemsize
    needed = sum(header.numel() * width for header in source.headers.values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"--verify logits builds the model in {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free; {_ADVICE}"
        )


def compare_logits(
    source: ModelSource, targets: Mapping[str, ModelSource], progress: Progress
) -> Comparison:
    """Compare the logits of random tokens, bit for bit.

    Args:
        targets: What was written, by how it was opened.

    Raises:
        ConfigError: A model cannot be built from its config.
    """
    length, vocab_size = min(MAX_LENGTH, _row_length(source)), source.config.model.vocab_size
    generator = torch.Generator().manual_seed(_SEED)
    tokens_BS = torch.randint(vocab_size, (SEQUENCES, length), generator=generator)
    want = logits_of(source, tokens_BS)
    found: dict[str, Difference] = {}
    for number, (name, target) in enumerate(targets.items(), start=1):
        progress("verify", number, len(targets) + 1)
        if (one := difference(want, logits_of(target, tokens_BS))) is not None:
            found[name] = one
    progress("verify", 1, 1)
    return Comparison(
        kind="logits",
        compared=want.numel() * len(targets),
        different={name: one.text for name, one in found.items()},
        max_difference=max((one.largest for one in found.values()), default=0.0),
    )


def logits_of(source: ModelSource, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of a stored model."""
    with warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.simplefilter("ignore")
        from ascend_run.core.log.setup import configure_logging
        from ascend_run.core.model.build import build_model
        from ascend_run.core.model.initialization import named_parameters
        from ascend_run.core.run import prepared_rank
        from ascend_run.core.train.seeding import seed_everything

        prepared = _prepared(source)
        with (
            configure_logging(None, level="warning"),  # what a run chooses is no output of convert
            prepared_rank(prepared.run_request()) as (hooks, context),
            torch.no_grad(),
        ):
            seed_everything(context.config, context.layout)
            bundle = build_model(
                context.config, hooks, context.groups, context.device, dtype=compute_dtype(source)
            )
            (model,) = bundle.chunks
            for name, parameter in named_parameters(model):
                tensor = source.tensor(name)
                parameter[: len(tensor)].copy_(tensor)
            positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
            result: Tensor = model.eval()(tokens_BS, positions)
            return result.clone()


def compute_dtype(source: ModelSource) -> torch.dtype:
    is_double = any(header.dtype is torch.float64 for header in source.headers.values())
    return torch.float64 if is_double else torch.float32


def _row_length(source: ModelSource) -> int:
    """Return a sequence length that the model's positions allow."""
    length: int = source.config.data.seq_length
    return min(length, source.config.model.max_position_embeddings or length)


def _prepared(source: ModelSource) -> PreparedRun:
    """Prepare a run of the model on one rank.

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
            f"data.seq_length={_row_length(source)}",
        ]
        try:
            return prepare_raw(read_raw(file, words), world_size=1)
        except AscendRunError as problem:
            raise ConfigError(
                f"the logits of {source.folder} cannot be computed; {_ADVICE}",
                problem.problems or (problem.headline,),
            ) from None
