"""Token files of samples: a pair of files for each field, and a record of how they were made.

``PREFIX_packed_FIELD_document.bin`` and ``.idx`` hold a field in Megatron's format, one document a
sample; ids that are not trained are -100 in ``labels``. The names are those of MindSpeed-LLM's
instruction datasets. ``PREFIX.json`` is the record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import DataError

from .dataset_paths import bin_path, idx_path, sidecar_path
from .encoder import Encoder
from .fields import UNTRAINED
from .indexed import TokenIndex, read_index
from .labelling import Labelled
from .omissions import Omitted, omitted_of_json

FORMAT: Final = "ascend-run sample dataset"
FORMAT_VERSION: Final = 1
_OF_TURNS: Final = ("train_on_inputs", "mask_history")
"""Options of an encoder that stand in a record if they are set."""


def field_prefix(prefix: str | Path, field: str) -> Path:
    """Return the prefix of the token files of one field."""
    return Path(f"{prefix}_packed_{field}_document")


def is_sample_dataset(prefix: str | Path) -> bool:
    """Return whether a path is the prefix of token files of samples."""
    path = Path(prefix)
    return not path.exists() and any(path.parent.glob(f"{path.name}_packed_*_document.idx"))


@attrs.frozen(kw_only=True)
class SamplesRead:
    """How many samples were read and kept, and what was left out."""

    read: int
    samples: int
    left_out: Mapping[str, Omitted]
    """Reason -> samples."""


@attrs.frozen(kw_only=True)
class SampleRecord:
    """``PREFIX.json``: how the token files of samples were made."""

    sample: str
    """Type of the samples, such as ``Conversation``."""
    handler: str
    keys: Mapping[str, str]
    encoding: Mapping[str, Any]
    """See ``encoding_facts``."""
    report: SamplesRead
    idx_sha256: Mapping[str, str]
    """Field -> digest of its index."""
    bin_sha256: Mapping[str, str]
    """Field -> digest of its ids."""
    options: Mapping[str, Any]
    """The further options that were given."""
    ascend_run_version: str

    def facts(self, prefix: str) -> Mapping[str, object]:
        """Return what determines the samples, as part of a cache key."""
        return {
            "name": prefix,
            "files": [*self.bin_sha256.values(), *self.idx_sha256.values()],
        }

    def encode(self) -> bytes:
        """Return the content of the file."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **attrs.asdict(self)}
        return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def encoding_facts(encoder: Encoder) -> dict[str, Any]:
    """Return what token files and a run must agree on, by names for messages."""
    return {
        "tokenizer": encoder.tokenizer.sha256,
        "chat template": hashlib.sha256(encoder.template.source.encode()).hexdigest(),
        "date": encoder.template.date,
        "special_tokens": "keep" if encoder.keeps_special else "drop",
        **{name: True for name in _OF_TURNS if getattr(encoder, name)},
    }


def read_sample_record(prefix: str | Path) -> SampleRecord:
    """Read the record of a dataset.

    Raises:
        DataError: It is missing, of another format or damaged.
    """
    path = sidecar_path(prefix)
    try:
        values = json.loads(path.read_bytes())
        if values.pop("format") != FORMAT or values.pop("format_version") != FORMAT_VERSION:
            raise ValueError(f"expected {FORMAT!r}, version {FORMAT_VERSION}")
        report = values.pop("report")
        left_out = omitted_of_json(report.pop("left_out"))
        return SampleRecord(**values, report=SamplesRead(**report, left_out=left_out))
    except OSError as error:
        raise DataError(f"{prefix}: its record {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is not the record of a dataset of samples ({error}); make the dataset again "
            "with ascend-run preprocess"
        ) from error


def read_field(prefix: str | Path, field: str, record: SampleRecord) -> TokenIndex:
    """Read and validate the index of one field.

    Raises:
        DataError: A file is missing or damaged, or is not the one of the record.
    """
    path = field_prefix(prefix, field)
    index = read_index(path)
    if field not in record.idx_sha256:
        raise DataError(f"{prefix}: its record has no field {field!r}")
    with idx_path(path).open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != record.idx_sha256[field]:
            raise DataError(f"{idx_path(path)} is not the file of the record {prefix}.json")
    return index


def check_sample_dataset(prefix: str, sample: str, encoder: Encoder | None) -> None:
    """Check the files of a dataset against its record, and the record against a run.

    Args:
        sample: Type of the samples that the run needs.
        encoder: What the run would encode sources with; None if it cannot be made.

    Raises:
        DataError: The dataset has other samples, was encoded otherwise, or its files are damaged.
    """
    record = read_sample_record(prefix)
    if record.sample != sample:
        raise DataError(
            f"{prefix} holds {record.sample} samples of the handler {record.handler!r}, and "
            f"{sample} samples are needed here"
        )
    if encoder is not None:
        mine = encoding_facts(encoder)
        names = dict.fromkeys((*record.encoding, *mine))
        others = [name for name in names if record.encoding.get(name) != mine.get(name)]
        if others:
            raise DataError(
                f"{prefix} was made with another {' and '.join(others)} than this run has; make it "
                "again with ascend-run preprocess, or change the options of the run"
            )
    for field in record.idx_sha256:
        read_field(prefix, field, record)
        with bin_path(field_prefix(prefix, field)).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != record.bin_sha256[field]:
            raise DataError(
                f"{bin_path(field_prefix(prefix, field))} is damaged: its SHA-256 is not that of "
                "the record; copy it again, or make the dataset again"
            )


def read_labelled(prefix: str, side: str = "") -> Iterator[tuple[str, Labelled]]:
    """Yield the documents of a dataset with ``PREFIX:number``, from 1.

    Args:
        side: What the names of the fields begin with: ``chosen_`` or ``rejected_`` for pairs.

    Raises:
        DataError: The files are damaged, or their lengths differ.
    """
    record = read_sample_record(prefix)
    ids, labels = (read_field(prefix, side + field, record) for field in ("input_ids", "labels"))
    if not np.array_equal(ids.lengths, labels.lengths):
        raise DataError(f"{prefix}: its ids and labels have different lengths")
    all_ids, all_labels = ids.ids(), labels.ids()
    ends = np.cumsum(ids.lengths, dtype=np.int64)
    for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
        trained = all_labels[begin:end] != UNTRAINED
        yield f"{prefix}:{number}", Labelled(all_ids[begin:end].tolist(), trained.tolist())
