"""Read and write PEFT's ``adapter_config.json``, and check the tensors beside it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.ops.linear.peft_settings import changed_settings, pattern_problems, size_problems
from ascend_run.ops.linear.peft_writing import Adapted, written_settings
from ascend_run.plugin_api import CheckpointError

from .saved_modules import EMBEDDING, is_tied, peft_modules
from .sizes import alpha_of_part, rank_of_part
from .targets import EXPERT_PARTS, frozen_names, peft_name_in_layer

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

CONFIG_FILE: Final = "adapter_config.json"
TENSOR_FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
LOAD: Final = "plugins.lora.load"


@attrs.frozen(kw_only=True)
class StoredAdapter:
    """A folder in PEFT format; its tensors are not read."""

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor name -> shape."""
    metadata: Mapping[str, str]
    """Of the file of tensors."""
    named: str = LOAD  #: The option or argument that names the folder.


def export_folder(config: RunConfig) -> Path:
    """Return the folder to which a run writes its adapter."""
    return Path(config.run.output_dir) / "adapter"


def read_adapter(folder: str | Path, named: str = LOAD) -> StoredAdapter:
    """Read the config and the tensor shapes of a folder; messages begin with what has named it.

    Raises:
        CheckpointError: The folder is not in PEFT format, or its files cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{named}: there is no folder {root}")
    if not (root / TENSOR_FILE).is_file():
        hint = ""
        if (root / "adapter_model.bin").is_file():
            hint = "; adapter_model.bin is a pickle, which can run code: save it as safetensors"
        raise CheckpointError(f"{named}: {root} has no {TENSOR_FILE}{hint}")
    try:
        config = json.loads((root / CONFIG_FILE).read_text(encoding="utf-8"))
        with (root / TENSOR_FILE).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > 2**27:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()
                  if name != "__metadata__"}  # fmt: skip
        metadata = header.get("__metadata__", {})
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} holds no JSON object")
        if not isinstance(metadata, dict):
            raise ValueError(f"{TENSOR_FILE} has no table of metadata")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{named}: {root} cannot be read: {error}") from None
    return StoredAdapter(folder=root, config=config, shapes=shapes, metadata=metadata, named=named)


def neutral_problems(found: StoredAdapter) -> Iterator[str]:
    """Yield the settings that make a stored adapter more than ``B A`` beside a weight."""
    changed = changed_settings(found.config)
    if found.config.get("fan_in_fan_out"):
        changed["fan_in_fan_out"] = False
    for key, neutral in changed.items():
        yield (
            f"{found.named}: {found.folder} has {key}={found.config[key]!r}; only {neutral!r} "
            "is supported"
        )
    for problem in (*size_problems(found.config), *pattern_problems(found.config)):
        yield f"{found.named}: {found.folder}: {problem}"


def peft_config(config: RunConfig, options: LoraOptions, parts: Sequence[str]) -> dict[str, object]:
    """Return the content of ``adapter_config.json``."""
    adapted = [
        Adapted(
            name=peft_name_in_layer(part, config.model.family),
            rank=rank_of_part(part, options),
            alpha=alpha_of_part(part, options),
            is_stacked=part in EXPERT_PARTS,
        )
        for part in parts
    ]
    return written_settings(
        adapted,
        frozen_names(parts, config),
        rank=options.rank,
        alpha=options.alpha,
        num_labels=config.model.num_labels,
        more={
            "base_model_name_or_path": config.model.hf_path,
            "ensure_weight_tying": is_tied(config) and EMBEDDING in options.modules_to_save,
            "fan_in_fan_out": False,
            "lora_dropout": options.dropout,
            "modules_to_save": peft_modules(config, options) or None,
            "use_dora": options.dora,
            "use_rslora": options.rslora,
        },
    )
