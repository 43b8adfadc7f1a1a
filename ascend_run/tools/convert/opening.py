"""Recognise the format of a checkpoint and open it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any

from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api.errors import CheckpointError, ConfigError
from ascend_run.tools.convert.formats.latent_attention import with_megatron_modules
from ascend_run.tools.convert.formats.megatron_switches import require_stated
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.formats.mp_rank_files import (
    TRACKER,
    iteration_folder,
    iteration_of,
    open_mp_rank,
)
from ascend_run.tools.convert.formats.mp_rank_reading import stored_model
from ascend_run.tools.convert.formats.safe_pickle import Inert, load_file
from ascend_run.tools.convert.formats.torch_dist import COMMON, TorchDistModel
from ascend_run.tools.convert.formats.torch_dist_index import INDEX

from .adapters.peft import TENSORS, with_peft_adapter
from .adapters.score_heads import num_labels
from .model_config import (
    ModelConfig,
    config_of_args,
    config_of_file,
)
from .opening_runs import open_hf, open_run, with_own_adapters
from .source_options import SourceOptions


class Format(StrEnum):
    """A format that is read; ``mp-rank`` is read whatever the names of its tensors."""

    HF = "hf"
    ASCEND_RUN = "ascend-run"
    MP_RANK = "mp-rank"
    TORCH_DIST = "torch-dist"


def recognised(path: Path, step: int | None) -> Format:
    """Return the format of a folder by its files.

    Args:
        step: The iteration to read, of a folder with several.

    Raises:
        CheckpointError: There is no folder, or no known file in it.
    """
    if not path.is_dir():
        raise CheckpointError(f"no folder at {path}; name a checkpoint's folder")
    if (path / INDEX).is_file():
        return Format.TORCH_DIST
    if any(path.glob("mp_rank_*")) or (path / TRACKER).is_file():
        folder = iteration_folder(path, step)
        return Format.TORCH_DIST if (folder / INDEX).is_file() else Format.MP_RANK
    if (path / "config.json").is_file():
        return Format.HF
    if any((path / name).exists() for name in ("manifest.json", "checkpoints")) or any(
        path.glob("step_*")
    ):
        return Format.ASCEND_RUN
    raise CheckpointError(
        f"{path} has no checkpoint of a known format: neither config.json (Hugging Face), "
        f"checkpoints/step_* (ascend-run) nor {TRACKER} or mp_rank_* (Megatron)"
    )


def open_model(
    path: Path, format_: Format, options: SourceOptions, stack: ExitStack
) -> ModelSource:
    """Open a stored model; nothing but its headers is read.

    Args:
        stack: Closes the files.

    Raises:
        AscendRunError: It cannot be read, or its config is unknown.
    """
    if format_ is not Format.ASCEND_RUN:
        for option, value, what in (
            ("--weights", options.weights, "a run"),
            ("--base", options.base, "the adapters of a run"),
        ):
            if value is not None:
                raise ConfigError(f"{option} goes with {what}; {path} is of format {format_}")
    try:
        source = _open(path, format_, options, stack)
        if options.adapter is not None:
            source = with_peft_adapter(source, options.adapter, stack)
    except OSError as problem:
        file = problem.filename or path
        raise CheckpointError(f"{file} cannot be read: {problem.strerror or problem}") from None
    return source


def _open(path: Path, format_: Format, options: SourceOptions, stack: ExitStack) -> ModelSource:
    if format_ is Format.HF:
        if options.step is not None or options.config is not None:
            raise ConfigError(f"--step and --config do not go with a Hugging Face folder ({path})")
        adapter = options.adapter
        labels = None if adapter is None else num_labels(adapter / TENSORS)
        return open_hf(path, options.family, stack, labels)
    if format_ is Format.ASCEND_RUN:
        run = open_run(path, options)
        return with_own_adapters(run, options.base, stack)
    if format_ is Format.TORCH_DIST:
        return _open_torch_dist(path, options)
    return _open_mp_rank(path, options)


def _open_mp_rank(path: Path, options: SourceOptions) -> ModelSource:
    folder = iteration_folder(path, options.step)
    files = open_mp_rank(folder)
    model = _config_of_megatron(folder, files.args, options)
    stored = stored_model(
        files,
        model.config,
        tp_extend_ep=options.tp_extend_ep,
        first_copy=options.first_copy,
    )
    opened = with_megatron_modules(stored.headers, stored.read, model.config)
    return ModelSource(
        family=model.family,
        config=model.config,
        config_toml=model.toml,
        stated=model.stated,
        step=files.iteration,
        folder=folder,
        headers=opened.headers,
        read=opened.read,
        args=files.args,
    )


def _open_torch_dist(path: Path, options: SourceOptions) -> ModelSource:
    folder = iteration_folder(path, options.step)
    stored = load_file(folder / COMMON) if (folder / COMMON).is_file() else {}
    common: Mapping[str, Any] = stored if isinstance(stored, dict) else {}
    stored_args = common.get("args")
    args = stored_args.fields if isinstance(stored_args, Inert) else {}
    model = _config_of_megatron(folder, args, options)
    tensors = TorchDistModel(folder, model.config)
    opened = with_megatron_modules(tensors.headers, tensors.read, model.config)
    return ModelSource(
        family=model.family,
        config=model.config,
        config_toml=model.toml,
        stated=model.stated,
        step=iteration_of(common, folder),
        folder=folder,
        headers=opened.headers,
        read=opened.read,
        args=args,
    )


def _config_of_megatron(
    folder: Path, args: Mapping[str, Any], options: SourceOptions
) -> ModelConfig:
    """Return the config that is named, that lies beside the checkpoint, or that its args give."""
    beside = next(
        (
            place / CONFIG_NAME
            for place in (folder, folder.absolute().parent)
            if (place / CONFIG_NAME).is_file()
        ),
        None,
    )
    file = None if options.from_args else options.config or beside
    if file is not None:
        return config_of_file(file, options.family)
    if options.family is None:
        raise ConfigError(
            f"{folder} does not say which model family it is of; name it with --family, or the "
            "config with --config"
        )
    model = config_of_args(options.family, args, str(folder))
    require_stated(model.config, args, str(folder))
    return model
