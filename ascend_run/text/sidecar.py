"""``PREFIX.json``: provenance of a pair of token files, written after both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api import DataError

from .dataset_paths import sidecar_path

FORMAT: Final = "ascend-run token dataset"
FORMAT_VERSION: Final = 1

_text: Any = attrs.validators.instance_of(str)
_whole: Any = attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(0))


@attrs.frozen(kw_only=True)
class FileDigest:
    """Size and SHA-256 of a file."""

    size_bytes: int = attrs.field(validator=_whole)
    sha256: str = attrs.field(validator=_text)

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Return those of a file."""
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
            return cls(size_bytes=stream.tell(), sha256=digest.hexdigest())


@attrs.frozen(kw_only=True)
class Sidecar:
    """The record of ``PREFIX.bin`` and ``PREFIX.idx``."""

    tokenizer_sha256: str = attrs.field(validator=_text)
    """Fingerprint of the tokenizer."""
    vocab_size: int = attrs.field(validator=_whole)
    """Token ids are below this."""
    eod: int | None = attrs.field(validator=attrs.validators.optional(_whole))
    """Id of the end-of-document token."""
    append_eod: bool = attrs.field(validator=attrs.validators.instance_of(bool))
    """Whether every document ends with ``eod``."""
    dtype: str = attrs.field(validator=_text)
    documents: int = attrs.field(validator=_whole)
    tokens: int = attrs.field(validator=_whole)
    bin: FileDigest
    idx: FileDigest
    ascend_run_version: str = attrs.field(validator=_text)


def encode_sidecar(sidecar: Sidecar) -> bytes:
    """Encode the sidecar file."""
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **attrs.asdict(sidecar)}
    return (json.dumps(values, indent=2) + "\n").encode()


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Read the sidecar of a dataset; return None if it does not exist.

    Raises:
        DataError: The file has another format or is corrupt.
    """
    path = sidecar_path(prefix)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        values = json.loads(content)
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, expected {FORMAT_VERSION}")
        for name in ("bin", "idx"):
            values[name] = FileDigest(**values[name])
        return Sidecar(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is not the record of a token dataset ({error}); make the dataset again with "
            "ascend-run preprocess, or move the file away to use the dataset without its record"
        ) from error
