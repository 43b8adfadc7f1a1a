"""Encode the samples of a data handler to token files, one pair of files a field."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import numpy as np

import ascend_run
from ascend_run.plugin_api import ConfigError, DataError
from ascend_run.text.dataset_paths import bin_path, idx_path, sidecar_path
from ascend_run.text.encoder import Encoder, accepted, batches_of, on_threads
from ascend_run.text.fields import FIELDS, EncodeFields, Fields, RewardTokens, field_encoder
from ascend_run.text.file_collisions import NamedPath, file_collisions
from ascend_run.text.handlers.loading import key_mapping, load_handler
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.text.omissions import Omissions, left_out_reasons
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.reading import SampleReader
from ascend_run.text.sample_files import SampleRecord, SamplesRead, encoding_facts, field_prefix
from ascend_run.text.samples import Conversation, Preference, ProcessReward, Sample, Text
from ascend_run.text.sources import find_sources

from .lengths import Lengths
from .sample_report import SampleReport
from .staged_files import StagedFiles
from .workers import in_processes, useful_processes

_LABELS: Final = np.dtype("<i4")
"""Labels are ids or -100."""
_BYTES_PER_PROCESS: Final = 4 * 2**20


@attrs.frozen(kw_only=True)
class SampleOptions:
    """What to read, how to encode it, and where to write."""

    inputs: tuple[Path, ...]
    output_prefix: Path
    handler: str
    map_keys: tuple[str, ...] = ()
    tokenizer: Path | None = None
    """Folder with tokenizer.json and tokenizer_config.json."""
    template: str | None = None
    date: str | None = None
    special_tokens: str = "drop"
    equal_answers: str = "refuse"
    """Of preferences: ``refuse`` the file, or ``drop`` the pair."""
    train_on_inputs: bool = False
    mask_history: bool = False
    placeholder_token: str | None = None
    reward_tokens: tuple[str, ...] = ()
    workers: int = 1
    """Processes that encode, at most."""
    overwrite: bool = False
    report: Path | None = None
    """Page to write."""


def preprocess_samples(options: SampleOptions) -> SampleReport:
    """Encode samples to token files with a record.

    Raises:
        ConfigError: Options contradict each other, or output would overwrite an input.
        DataError: Records, tokenizer or template cannot be used, or no sample is left.
        PluginLoadError: The handler cannot be imported.
        StorageError: Output cannot be written; nothing is published then.
    """
    begun = time.monotonic()
    handler = load_handler(options.handler)
    assert handler.sample is not Text, "plain text is written by preprocess"
    reader = SampleReader(handler, key_mapping(handler, options.map_keys))
    files, problems = find_sources(options.inputs)
    fields = FIELDS[handler.sample]
    if problems := [*problems, *_problems(options, handler.sample, files, fields)]:
        raise ConfigError("cannot preprocess", problems)
    encoder, encode = _encoders(options, handler.sample)
    omissions = Omissions()
    batches = batches_of(reader.read(files))
    size_bytes = sum(file.stat().st_size for file in files if file.exists())
    processes = useful_processes(options.workers, size_bytes, _BYTES_PER_PROCESS)
    results = on_threads(batches, encode)
    if processes > 1:
        results = in_processes(batches, partial(_encode, options, handler.sample), processes)
    encoded = accepted(results, omissions)
    with StagedFiles(overwrite=options.overwrite) as staged:
        files_of = _FieldFiles(options.output_prefix, fields, encoder.tokenizer.vocab_size, staged)
        samples = files_of.add_all(sample for _, sample in encoded)
        left_out = omissions.report()
        if not samples:
            raise DataError(
                f"none of {reader.count} samples in {len(files)} files can be used",
                list(left_out_reasons(left_out)),
            )
        report = SamplesRead(read=reader.count, samples=samples, left_out=left_out)
        record = _record(options, reader, encoder, report, files_of)
        staged.open(sidecar_path(options.output_prefix)).write(record.encode())
        written = SampleReport(
            prefix=str(options.output_prefix),
            handler=handler.name,
            files=len(files),
            read=reader.count,
            samples=samples,
            left_out=left_out,
            tokens=files_of.tokens(),
            lengths=files_of.lengths(),
            seconds=time.monotonic() - begun,
        )
        if options.report is not None:
            staged.open(options.report).write(written.page().render().encode())
        staged.publish()
    return written


class _FieldFiles:
    """The token files of the fields, while they are written."""

    def __init__(
        self, prefix: Path, fields: Sequence[str], vocab_size: int, staged: StagedFiles
    ) -> None:
        self._prefix, self._staged = prefix, staged
        ids = dtype_for(vocab_size)
        self.writers = {
            field: IndexedWriter(
                staged.open(bin_path(field_prefix(prefix, field))),
                _LABELS if field.endswith("labels") else ids,
            )
            for field in fields
        }

    def add_all(self, samples: Iterable[Fields]) -> int:
        """Write all samples; return their number."""
        count = 0
        for sample in samples:
            count += 1
            for field, writer in self.writers.items():
                writer.add(sample[field])
        return count

    def write_indices(self) -> dict[str, str]:
        """Write the index of each field; return their digests."""
        digests = {}
        for field, writer in self.writers.items():
            content = writer.index()
            self._staged.open(idx_path(field_prefix(self._prefix, field))).write(content)
            digests[field] = hashlib.sha256(content).hexdigest()
        return digests

    def tokens(self) -> dict[str, int]:
        """Return field -> its tokens."""
        return {field: writer.tokens for field, writer in self.writers.items()}

    def lengths(self) -> dict[str, Lengths]:
        """Return field -> the lengths of its samples, each distribution once."""
        found: dict[str, Lengths] = {}
        for field, writer in self.writers.items():
            if (lengths := Lengths.of(writer.lengths)) not in found.values():
                found[field] = lengths
        return found


def _record(
    options: SampleOptions,
    reader: SampleReader,
    encoder: Encoder,
    report: SamplesRead,
    files: _FieldFiles,
) -> SampleRecord:
    """Write the indices, and return the record of all files."""
    kept = ("template", "placeholder_token", "reward_tokens")
    return SampleRecord(
        sample=reader.handler.sample.__name__,
        handler=reader.handler.name,
        keys=dict(reader.keys),
        encoding=encoding_facts(encoder),
        report=report,
        idx_sha256=files.write_indices(),
        bin_sha256={field: writer.bin_sha256 for field, writer in files.writers.items()},
        options={name: getattr(options, name) for name in kept},
        ascend_run_version=ascend_run.__version__,
    )


def _problems(
    options: SampleOptions, sample: type, files: Sequence[Path], fields: Sequence[str]
) -> Iterator[str]:
    rates = sample is ProcessReward
    if rates and (options.placeholder_token is None or not options.reward_tokens):
        yield (
            f"the handler {options.handler!r} needs --placeholder-token TOKEN and --reward-tokens "
            "TOKEN, once for each rating"
        )
    if not rates and (options.placeholder_token is not None or options.reward_tokens):
        yield (
            "--placeholder-token and --reward-tokens are for handlers of process rewards; leave "
            "them out"
        )
    if (options.train_on_inputs or options.mask_history) and sample is not Conversation:
        yield (
            "--train-on-inputs and --mask-history are for handlers of conversations, and "
            f"{options.handler!r} makes {sample.__name__} samples; leave them out"
        )
    if options.equal_answers != "refuse" and sample is not Preference:
        yield (
            f"--equal-answers is for handlers of pairs, and {options.handler!r} makes "
            f"{sample.__name__} samples; leave it out"
        )
    if options.train_on_inputs and options.mask_history:
        yield "--train-on-inputs trains every token, and --mask-history the last turn; name one"
    prefixes = [field_prefix(options.output_prefix, field) for field in fields]
    outputs = [NamedPath("the record", sidecar_path(options.output_prefix))]
    for prefix in prefixes:
        outputs += [NamedPath("a token file", bin_path(prefix))]
        outputs += [NamedPath("an index", idx_path(prefix))]
    if options.report is not None:
        outputs.append(NamedPath("--report", options.report))
    inputs = [NamedPath("the input", file) for file in files]
    if options.tokenizer is not None and options.tokenizer.is_dir():
        inputs += [NamedPath("--tokenizer", path) for path in sorted(options.tokenizer.iterdir())]
    yield from file_collisions(inputs, outputs)


def _encode(options: SampleOptions, kind: type[Sample]) -> EncodeFields:
    """Return what encodes samples in a worker process."""
    return _encoders(options, kind)[1]


def _encoders(options: SampleOptions, kind: type[Sample]) -> tuple[Encoder, EncodeFields]:
    tokenizer, template = open_chat(
        ChatOptions(
            tokenizer=options.tokenizer,
            template=options.template,
            date=options.date,
            tokenizer_option="--tokenizer",
            template_option="--template",
            date_option="--date",
        )
    )
    encoder = Encoder(
        tokenizer=tokenizer,
        template=template,
        keeps_special=options.special_tokens == "keep",
        train_on_inputs=options.train_on_inputs,
        mask_history=options.mask_history,
    )
    rewards = None
    if options.placeholder_token is not None:
        rewards = RewardTokens.of(tokenizer, options.placeholder_token, options.reward_tokens)
    drops_equal = options.equal_answers == "drop"
    return encoder, field_encoder(kind, encoder, rewards, drops_equal=drops_equal)
