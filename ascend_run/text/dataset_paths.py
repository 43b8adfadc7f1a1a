"""Paths of a dataset's token files."""

from __future__ import annotations

from pathlib import Path

from .tokenizer_content import NAMES


def bin_path(prefix: str | Path) -> Path:
    """Return ``PREFIX.bin``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return ``PREFIX.idx``."""
    return Path(f"{prefix}.idx")


def sidecar_path(prefix: str | Path) -> Path:
    """Return ``PREFIX.json``."""
    return Path(f"{prefix}.json")


def tokenizer_files(path: Path) -> tuple[Path, ...]:
    """Return the paths that are read for a tokenizer: the file, or the files in its folder."""
    return (path, *(path / name for name in NAMES), path / "tokenizer_config.json")


def is_source(name: str | Path) -> bool:
    """Return whether a name is a file or folder of text, and not the prefix of token files."""
    path = Path(name)
    is_token_file = path.suffix in (".bin", ".idx")
    has_token_files = bin_path(path).exists() or idx_path(path).exists()
    return path.exists() and not is_token_file and not has_token_files
