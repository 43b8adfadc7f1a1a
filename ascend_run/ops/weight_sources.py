"""What a model's weights were loaded from, so that a run resumes beside the same ones. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_SAMPLE_BYTES: Final = 2**20
"""Bytes hashed at the start and at the end of each file."""

_NONE: Final[Mapping[str, str]] = {"source": "none", "digest": ""}


def weight_source(folder: str | None, seed: int) -> dict[str, str]:
    """Return ``source``, for messages, and ``digest``, which determines the weights.

    Args:
        folder: A Hugging Face folder; None for initial weights.
        seed: ``run.seed``, which these depend on.
    """
    if folder is None:
        return {"source": f"initial weights of run.seed={seed}", "digest": f"seed {seed}"}
    return {"source": str(folder), "digest": weights_digest(folder)}


def weights_digest(folder: str | Path, config: str = "config.json") -> str:
    """Return a digest of a Hugging Face folder by the ends of its files.

    Args:
        config: Name of the file beside those of tensors.
    """
    digest, root = hashlib.sha256(), Path(folder)
    for path in sorted([root / config, *root.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def other_sources(
    saved: Mapping[str, Mapping[str, str]] | None, now: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield a sentence for each model whose weights differ.

    Args:
        saved: Name of each model -> its ``weight_source``, in a checkpoint; None if it lacks them.
        now: Likewise, of this run.
    """
    if saved is None:
        return
    for name in sorted({*saved, *now}):
        before, after = saved.get(name, _NONE), now.get(name, _NONE)
        if before["digest"] != after["digest"]:
            changed = ", which has changed" if before["source"] == after["source"] else ""
            yield (
                f"{name}: the checkpoint's is {before['source']}, this run's is {after['source']}"
                f"{changed}; name the same weights, or start from scratch in another "
                "run.output_dir"
            )
