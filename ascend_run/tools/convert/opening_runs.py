"""Open Hugging Face folders, and checkpoints of runs with the adapters in them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import num_stored_depths
from ascend_run.core.hugging_face.stored_tensors import StoredTensors
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.prepare.config.reading import read_raw
from ascend_run.tools.convert.formats.hugging_face_model import HfModel
from ascend_run.tools.convert.formats.model_source import ModelSource
from ascend_run.tools.convert.formats.run_checkpoints import CheckpointSource, open_checkpoint

from .adapters.run_adapters import (
    has_adapters,
    lacks_base,
    require_same_base,
    with_run_adapters,
    without_adapters,
)
from .adapters.saved_modules import with_saved_parameters
from .empty_slots import count_layers
from .model_config import config_of_hf, config_of_run, without_empty_slots

if TYPE_CHECKING:
    from .source_options import SourceOptions


def open_hf(
    path: Path, family: str | None, stack: ExitStack, num_labels: int | None = None
) -> ModelSource:
    """Open a Hugging Face folder.

    Args:
        family: Name of its plugin; None: the one that its config.json names.
        stack: Closes the files.
        num_labels: Of a score head that takes the place of its output layer; if it has a head, its
            own labels count.

    Raises:
        AscendRunError: It cannot be read, or its config is unknown.
    """
    model = config_of_hf(path, family)
    stored = stack.enter_context(StoredTensors(path))
    if depths := num_stored_depths(stored.names, model.family, model.config):
        model = config_of_hf(path, family, {"model.mtp_num_layers": depths})
    opened = HfModel(stored, model.family, model.config)
    headers: Mapping[str, Tensor] = opened.headers
    if num_labels is not None and not model.config.model.num_labels:
        model = config_of_hf(path, family, {"model.num_labels": num_labels})
        headers = _without_output(headers)
    return ModelSource(
        family=model.family,
        config=model.config,
        config_toml=model.toml,
        stated=model.stated,
        step=0,
        folder=path,
        hf_folder=path,
        headers=headers,
        read=opened.read,
    )


def _without_output(headers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters without the output layer, in whose place is a score head."""
    return {name: one for name, one in headers.items() if not name.startswith("output_layer.")}


@attrs.frozen
class OpenedRun:
    """A checkpoint of a run, with the parameters as they are stored."""

    source: ModelSource
    config: Path
    """The run's config."""
    given: Mapping[str, Any]
    """What it says, by dotted key."""
    values: Mapping[str, Any]
    """The JSON values of the run's entries."""

    @property
    def hf_path(self) -> Path | None:
        """The Hugging Face folder whose weights the run began with."""
        named = self.given.get("model.hf_path")
        return None if named is None else Path(str(named))


def open_run(path: Path, options: SourceOptions) -> OpenedRun:
    """Open a checkpoint of a run, without a base and with nothing merged.

    Raises:
        AscendRunError: It cannot be read, or its config is unknown.
    """
    found = CheckpointSource.find(path, options.step, options.config)
    model = config_of_run(found.config, options.family)
    opened = open_checkpoint(found, options.weights)
    if count_layers(opened.headers) < model.config.model.num_layers:
        model = without_empty_slots(model, found.config, options.family)
    source = ModelSource(
        family=model.family,
        config=model.config,
        config_toml=model.toml,
        stated=model.stated,
        step=opened.step,
        folder=found.folder,
        headers=opened.headers,
        read=opened.read,
    )
    given = {key: one.value for key, one in read_raw(found.config).values.items()}
    run = OpenedRun(source, found.config, given, opened.values)
    if run.hf_path is None or not run.hf_path.is_dir():
        return run
    return attrs.evolve(run, source=attrs.evolve(source, hf_folder=run.hf_path))


def with_own_adapters(run: OpenedRun, base: Path | None, stack: ExitStack) -> ModelSource:
    """Return the model of a checkpoint, with its adapters merged if it has any.

    Args:
        base: Hugging Face folder of the weights of adapters alone; None: the run's.
        stack: Closes its files.

    Raises:
        AscendRunError: The base cannot be read, is another than that of the adapters, or has no
            adapters to go with.
    """
    is_alone = has_adapters(run.source.headers) and lacks_base(run.source.headers)
    if base is not None and not is_alone:
        raise ConfigError(
            f"--base goes with adapters alone; {run.source.folder} has the weights itself: leave "
            "it out"
        )
    if not has_adapters(run.source.headers):
        return run.source
    own = without_adapters(run.source)
    frozen = own
    if is_alone:
        frozen = _base(run, base, stack)
        require_same_base(run.values, run.source, frozen.folder)
        frozen = with_saved_parameters(frozen, own, own.headers)
    return with_run_adapters(frozen, run.source, run.values)


def _base(run: OpenedRun, folder: Path | None, stack: ExitStack) -> ModelSource:
    """Open the weights to which the adapters of a checkpoint belong."""
    source = run.source
    folder = folder or run.hf_path
    if folder is None:
        raise ConfigError(
            f"{source.folder} has adapters alone, of a run that began with weights of its own "
            f"({run.config} names no model.hf_path), which no folder has; train with "
            "plugins.lora.checkpoint=full, whose checkpoints have them"
        )
    base = open_hf(folder, source.family_name, stack)
    headers: Mapping[str, Tensor] = base.headers
    if source.config.model.num_labels:  # the run has trained the head
        headers = _without_output(headers)
    return attrs.evolve(
        base,
        config=source.config,
        config_toml=source.config_toml,
        stated=source.stated,
        headers=headers,
    )
