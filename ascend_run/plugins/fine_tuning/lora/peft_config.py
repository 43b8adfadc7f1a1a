"""Read and write PEFT's ``adapter_config.json``, and check the tensors beside it. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.ops.linear.peft_settings import changed_settings
from ascend_run.plugin_api import CheckpointError

from .targets import PEFT_NAMES, peft_targets

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions

CONFIG_FILE: Final = "adapter_config.json"
TENSOR_FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."

_TENSOR: Final = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")


@attrs.frozen(kw_only=True)
class StoredAdapter:
    """A folder in PEFT format; its tensors are not read."""

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor name -> shape."""


def export_folder(config: RunConfig) -> Path:
    """Return the folder to which a run writes its adapter."""
    return Path(config.run.output_dir) / "adapter"


def read_adapter(folder: str | Path) -> StoredAdapter:
    """Read the config and the tensor shapes of a folder.

    Raises:
        CheckpointError: The folder is not in PEFT format, or its files cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"plugins.lora.load: there is no folder {root}")
    if not (root / TENSOR_FILE).is_file():
        hint = ""
        if (root / "adapter_model.bin").is_file():
            hint = "; adapter_model.bin is a pickle, which can run code: save it as safetensors"
        raise CheckpointError(f"plugins.lora.load: {root} has no {TENSOR_FILE}{hint}")
    try:
        config = json.loads((root / CONFIG_FILE).read_text(encoding="utf-8"))
        with (root / TENSOR_FILE).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > 2**27:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()
                  if name != "__metadata__"}  # fmt: skip
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} holds no JSON object")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"plugins.lora.load: {root} cannot be read: {error}") from None
    return StoredAdapter(folder=root, config=config, shapes=shapes)


def neutral_problems(found: StoredAdapter) -> Iterator[str]:
    """Yield the settings that make a stored adapter more than ``B A`` beside a weight."""
    changed = changed_settings(found.config)
    if found.config.get("fan_in_fan_out"):
        changed["fan_in_fan_out"] = False
    for key, neutral in changed.items():
        yield (
            f"plugins.lora.load: {found.folder} has {key}={found.config[key]!r}; only {neutral!r} "
            "is supported"
        )
    for key in ("r", "lora_alpha"):
        if not isinstance(found.config.get(key), int | float):
            yield f"plugins.lora.load: {found.folder} has no {key} in {CONFIG_FILE}"


def config_problems(
    found: StoredAdapter, config: RunConfig, options: LoraOptions, parts: Sequence[str]
) -> Iterator[str]:
    """Yield why a stored adapter does not match this run.

    Args:
        parts: The parts that the run adapts.
    """
    folder, stored = found.folder, found.config
    yield from neutral_problems(found)
    for key, ours, theirs in (
        ("rank", options.rank, stored.get("r")),
        ("alpha", options.alpha, stored.get("lora_alpha")),
        ("rslora", options.rslora, stored.get("use_rslora", False)),
    ):
        if ours != theirs:
            yield (
                f"plugins.lora.{key}={ours}, but the adapter in {folder} has {theirs}; set "
                f"plugins.lora.{key}={theirs}"
            )
    yield from _tensor_problems(found, config, parts)


def _tensor_problems(
    found: StoredAdapter, config: RunConfig, parts: Sequence[str]
) -> Iterator[str]:
    names = PEFT_NAMES[config.model.family]
    part_of = {module: part for part, module in names.items()}
    stored: set[str] = set()
    foreign: list[str] = []
    for name in sorted(found.shapes):
        match = _TENSOR.fullmatch(name)
        part = part_of.get(match[2]) if match else None
        if match is None or part is None or int(match[1]) >= config.model.num_layers:
            foreign.append(name)
        else:
            stored.add(part)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        yield (
            f"plugins.lora.load: {found.folder} holds tensors that this model does not have: "
            f"{', '.join(foreign[:3])}{more}"
        )
    if stored != set(parts):
        its = ",".join(part for part in names if part in stored)
        yield (
            f"plugins.lora.load: the adapter in {found.folder} adapts other parts than this run; "
            f"set plugins.lora.target_modules={its or 'none'}"
        )


def peft_config(config: RunConfig, options: LoraOptions, parts: Sequence[str]) -> dict[str, object]:
    """Return the content of ``adapter_config.json``."""
    alpha = options.alpha
    return {
        "base_model_name_or_path": config.model.hf_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": options.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": options.rank,
        "target_modules": peft_targets(parts, config),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": options.rslora,
    }
