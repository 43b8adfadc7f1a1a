"""Convert a checkpoint, and compare the result with its source before it gets its name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from .formats.model_source import ModelSource, Progress
from .new_folder import partial_folder, publish, refuse_taken, require_outside
from .opening import Format, SourceOptions, open_model, recognised
from .verifying.comparison import Comparison, compare_tensors


@attrs.frozen(kw_only=True)
class Conversion:
    """What a user asks for."""

    source: Path
    source_format: str | None
    """None: recognised by its files."""
    options: SourceOptions
    target: Path
    target_format: str
    layout: Mapping[str, Any]
    """Options of a target with ``mp_rank_*`` folders, as the command declares them."""
    verify: str | None
    """``tensors``, ``logits``, or None."""


@attrs.frozen
class Converted:
    """What was read, and the comparison, if one was asked for."""

    model: ModelSource
    comparison: Comparison | None = None


def convert(asked: Conversion, progress: Progress) -> Converted:
    """Convert. A target that differs from the source is not left.

    Raises:
        AscendRunError: The source cannot be read, or the target not be written.
    """
    refuse_taken(asked.target)
    with ExitStack() as stack:
        found = asked.source_format or recognised(asked.source, asked.options.step)
        model = open_model(asked.source, Format(found), asked.options, stack)
        for folder in (model.folder, asked.options.adapter, asked.options.base):
            if folder is not None:
                require_outside(asked.target, folder)
        if asked.verify is None:
            _write(asked.target, asked, model, progress)
            return Converted(model)
        if asked.verify == "logits":
            from .verifying.logits import require_buildable

            require_buildable(model)
        with partial_folder(asked.target) as beside:
            written = beside / "converted"
            _write(written, asked, model, progress)
            comparison = _compared(written, asked, model, progress)
            if not comparison.different:
                publish(written, asked.target)
        return Converted(model, comparison)


def _compared(
    written: Path, asked: Conversion, model: ModelSource, progress: Progress
) -> Comparison:
    """Compare the source with the files, which are read like any other source."""
    is_mp_rank = asked.target_format.startswith("mp-rank")
    format_ = Format.MP_RANK if is_mp_rank else Format(asked.target_format)
    with ExitStack() as stack:
        options = SourceOptions(family=model.family.model_type)
        read_back = open_model(written, format_, options, stack)
        if asked.verify == "tensors":
            return compare_tensors(model, read_back, progress)
        from .verifying.logits import compare_logits

        return compare_logits(model, read_back, progress)


def _write(target: Path, asked: Conversion, model: ModelSource, progress: Progress) -> None:
    if asked.target_format == "hf":
        from .exporting import export_hf

        export_hf(target, model.family, model.config, model.parameters(progress))
    elif asked.target_format == "ascend-run":
        from .formats.run_checkpoints import write_checkpoint

        write_checkpoint(target, model, progress)
    elif asked.target_format == "torch-dist":
        from .formats.megatron_names import Names
        from .formats.torch_dist import write_torch_dist

        names = Names(asked.layout["transformer_impl"])
        write_torch_dist(target, model, progress, names=names)
    else:
        from .formats.mp_rank_options import mp_rank_options
        from .formats.mp_rank_writing import write_mp_rank

        legacy = asked.target_format == "mp-rank-legacy"
        write_mp_rank(target, model, mp_rank_options(asked.layout, legacy=legacy), progress)
