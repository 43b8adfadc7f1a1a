"""The files that a run reads and writes, and collisions between them.

``plan`` imports this module, so it keeps its imports light.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ascend_run.text.dataset_paths import bin_path, idx_path, sidecar_path, tokenizer_files
from ascend_run.text.file_collisions import NamedPath, file_collisions
from ascend_run.types.config import RunConfig

CONFIG_NAME: Final = "config.toml"
RUN_FILES: Final = (
    CONFIG_NAME,
    "plan.json",
    "plugins.lock.json",
    "environment.json",
    "metrics.jsonl",
    "fingerprint.jsonl",
    "log.jsonl",
)
"""Files that a run writes to its folder, besides the report page rendered from them."""
PAGE_NAME: Final = "report.html"
RESOLVED_CONFIG_HEADER: Final = "# The resolved config of a run; it runs identically."
"""First line of a config written by a run."""


def run_inputs(config: RunConfig, file: Path | None) -> list[NamedPath]:
    """Return the files that a run reads.

    Args:
        file: The config file, or None.
    """
    inputs = [] if file is None else [NamedPath("--config", file)]
    if config.data.tokenizer is not None:
        paths = tokenizer_files(Path(config.data.tokenizer))
        inputs += [NamedPath("data.tokenizer", path) for path in paths]
    for key, names in (("train", config.data.train), ("validation", config.data.validation)):
        for name in names:
            # The name is either a file that the task reads, or the prefix of token files.
            paths = (Path(name), bin_path(name), idx_path(name), sidecar_path(name))
            inputs += [NamedPath(f"data.{key}", path) for path in paths]
    return inputs


def run_folder_problems(config: RunConfig, file: Path | None) -> list[str]:
    """Return a message for each input that the run would overwrite.

    The config in a run folder may be used to resume in the same folder: the run rewrites its
    resolved config. A hand-written config there is an input like any other.
    """
    folder = Path(config.run.output_dir)
    inputs = run_inputs(config, None if file is None or _is_resolved(file) else file)
    outputs = [NamedPath("a file of run.output_dir", folder / name) for name in RUN_FILES]
    return file_collisions(inputs, [*outputs, NamedPath("the report", folder / PAGE_NAME)])


def _is_resolved(file: Path) -> bool:
    """Return whether the config was written by a run."""
    header = RESOLVED_CONFIG_HEADER.encode()
    try:
        with file.open("rb") as stream:
            return stream.read(len(header)) == header
    except OSError:  # the next reader of the file reports the error
        return False
