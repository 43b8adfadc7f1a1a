"""Convert a checkpoint, and compare the result with its source before it gets its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api.errors import CheckpointError, StorageError

from .formats.model_source import ModelSource, Progress
from .new_folder import partial_folder, publish, refuse_taken, require_outside
from .opening import Format, open_model, recognised
from .position_biases import require_no_bias
from .source_options import SourceOptions
from .verifying.comparison import Comparison, compare_tensors
from .verifying.settings import Settings, compare_settings


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
    """What was read, and the comparisons, if they were asked for."""

    model: ModelSource
    comparison: Comparison | None = None
    settings: Settings | None = None

    @property
    def is_equal(self) -> bool:
        """Whether no difference was found."""
        found = (self.comparison, self.settings)
        return not any(one.different for one in found if one is not None)


def convert(request: Conversion, progress: Progress) -> Converted:
    """Convert. A target that differs from the source is not left.

    Raises:
        AscendRunError: The source cannot be read, or the target not be written.
    """
    refuse_taken(request.target)
    if request.target_format == "peft":
        return _convert_adapters(request, progress)
    with ExitStack() as stack:
        found = request.source_format or recognised(request.source, request.options.step)
        model = open_model(request.source, Format(found), request.options, stack)
        for folder in (model.folder, request.options.adapter, request.options.base):
            if folder is not None:
                require_outside(request.target, folder)
        _require_no_bias(request, model)
        if request.verify is None:
            _write(request.target, request, model, progress)
            return Converted(model)
        if request.verify == "logits":
            from .verifying.logits import require_buildable

            require_buildable(model)
        with partial_folder(request.target) as beside:
            written = beside / "converted"
            _write(written, request, model, progress)
            with _comparing(request, model):
                done = _compared(written, request, model, progress)
            if done.is_equal:
                publish(written, request.target)
        return done


def _convert_adapters(request: Conversion, progress: Progress) -> Converted:
    """Write the adapters of a run alone."""
    from .adapters.exporting import open_run_adapters, read_back, write_peft

    found = request.source_format or recognised(request.source, request.options.step)
    if found != Format.ASCEND_RUN:
        raise CheckpointError(
            f"{request.source} is of format {found}; --to peft writes the adapters of a run"
        )
    try:
        adapters = open_run_adapters(request.source, request.options)
    except OSError as problem:
        file = problem.filename or request.source
        raise CheckpointError(f"{file} cannot be read: {problem.strerror or problem}") from None
    require_outside(request.target, adapters.model.folder)
    _require_no_bias(request, adapters.model)
    if request.verify is None:
        write_peft(request.target, adapters, progress)
        return Converted(adapters.model)
    with partial_folder(request.target) as beside:
        written = beside / "converted"
        write_peft(written, adapters, progress)
        with _comparing(request, adapters.model), ExitStack() as stack:
            target = read_back(adapters, written, stack)
            done = Converted(adapters.model, compare_tensors(adapters.model, target, progress))
        if done.is_equal:
            publish(written, request.target)
    return done


def _require_no_bias(request: Conversion, model: ModelSource) -> None:
    """Check that the target's format has the position biases of the source's features."""
    if request.target_format != Format.ASCEND_RUN:
        require_no_bias(model.config, model.folder, request.target_format)


@contextmanager
def _comparing(request: Conversion, model: ModelSource) -> Iterator[None]:
    """Report an OSError as one of the comparison."""
    try:
        yield
    except OSError as problem:
        what = f"the comparison of {request.target} with {model.folder} failed"
        raise StorageError(f"{what}: {problem}; no target is left") from None


def _compared(
    written: Path, request: Conversion, model: ModelSource, progress: Progress
) -> Converted:
    """Compare the source with the files, which are read like any other source."""
    is_mp_rank = request.target_format.startswith("mp-rank")
    format_ = Format.MP_RANK if is_mp_rank else Format(request.target_format)
    with ExitStack() as stack:
        # As a user will read it: our config.toml names the family, config.json not always.
        named = model.family_name
        options = SourceOptions(family=named if format_ is Format.HF else None)
        read_back = open_model(written, format_, options, stack)
        settings = compare_settings(model, read_back, of_run=format_ is not Format.HF)
        if request.verify == "tensors":
            comparison = compare_tensors(model, read_back, progress)
        else:
            from .verifying.logits import compare_logits

            targets = {"logits": read_back}
            if read_back.args and not settings.of_args:
                foreign = SourceOptions(family=named, from_args=True)
                targets["logits, from its args"] = open_model(written, format_, foreign, stack)
            comparison = compare_logits(model, targets, progress)
        return Converted(model, comparison, settings)


def _write(target: Path, request: Conversion, model: ModelSource, progress: Progress) -> None:
    if request.target_format == "hf":
        from .exporting import export_hf, files_beside

        state, files = model.parameters(progress), files_beside(model.hf_folder)
        export_hf(target, model.family, model.config, state, files=files)
    elif request.target_format == "ascend-run":
        from .formats.run_checkpoints import write_checkpoint

        write_checkpoint(target, model, progress)
    elif request.target_format == "torch-dist":
        from .formats.megatron_names import Names
        from .formats.torch_dist import write_torch_dist

        names = Names(request.layout["transformer_impl"])
        write_torch_dist(target, model, progress, names=names)
    else:
        from .formats.mp_rank_options import mp_rank_options
        from .formats.mp_rank_writing import write_mp_rank

        legacy = request.target_format == "mp-rank-legacy"
        write_mp_rank(target, model, mp_rank_options(request.layout, legacy=legacy), progress)
