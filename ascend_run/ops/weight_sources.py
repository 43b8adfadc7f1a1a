"""What a model's weights were loaded from, so that a run resumes beside the same ones. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_SAMPLE_BYTES: Final = 2**12
"""Bytes hashed at the start, in the middle and at the end of each tensor."""
_LARGEST_HEADER: Final = 2**27

_SEED: Final = "seed "
_NONE: Final[Mapping[str, str]] = {"source": "none", "digest": ""}


def weight_source(folder: str | None, seed: int) -> dict[str, str]:
    """Return ``source``, for messages, and ``digest``, which determines the weights.

    Args:
        folder: A Hugging Face folder; None for initial weights.
        seed: ``run.seed``, which these depend on.
    """
    if folder is None:
        return {"source": f"initial weights of run.seed={seed}", "digest": f"{_SEED}{seed}"}
    return {"source": str(folder), "digest": weights_digest(folder)}


def is_of_folder(digest: str) -> bool:
    """Return whether a digest of ``weight_source`` is of weights in a folder."""
    return not digest.startswith(_SEED)


def weights_digest(folder: str | Path, *beside: str) -> str:
    """Return a digest of the tensors in a Hugging Face folder: of their names, dtypes, shapes and
    samples of their values.

    Which file holds a tensor does not count.

    Args:
        beside: Names of files that count too, in full.
    """
    root = Path(folder)
    digest = hashlib.sha256("\n".join(sorted(_lines(root))).encode())
    for name in beside:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def weights_differ(one: str | Path, other: str | Path) -> bool:
    """Return whether a tensor that two Hugging Face folders have differs in its dtype, its shape or
    samples of its values, or they have none in common.

    What only one of them has does not count: a head of another kind, for example.
    """
    first, second = (
        dict(line.split(" ", 1) for line in _lines(Path(root))) for root in (one, other)
    )
    common = first.keys() & second.keys()
    return not common or any(first[name] != second[name] for name in common)


def _lines(root: Path) -> Iterator[str]:
    for path in root.glob("*.safetensors"):
        yield from _tensors(path)


def _tensors(path: Path) -> Iterator[str]:
    """Yield what determines each tensor of a safetensors file; of another file, its content."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length) if length <= _LARGEST_HEADER else b"")
            places = [(name, entry["data_offsets"], entry) for name, entry in header.items()
                      if name != "__metadata__"]  # fmt: skip
            for name, (begin, end), entry in sorted(places, key=lambda place: place[1]):
                digest = hashlib.sha256()
                last = max(begin, end - _SAMPLE_BYTES)
                for start in sorted({begin, (begin + last) // 2, last}):
                    stream.seek(8 + length + start)
                    digest.update(stream.read(min(_SAMPLE_BYTES, end - start)))
                yield f"{name} {entry['dtype']} {entry['shape']} {digest.hexdigest()}"
        except (ValueError, KeyError, TypeError, AttributeError):  # no such file: read elsewhere
            stream.seek(0)
            yield f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}"


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
