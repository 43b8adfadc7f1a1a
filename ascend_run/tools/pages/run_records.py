"""What the files of a run folder hold, as records; a value that a file lacks is None or empty."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class ModelSize:
    """Section ``[model]``, as far as a page describes it."""

    family: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    num_moe_experts: int | None = None
    moe_router_topk: int | None = None


@attrs.frozen(kw_only=True)
class TrainLength:
    """Section ``[train]``, as far as a page describes it."""

    train_iters: int | None = None
    precision: str | None = None


@attrs.frozen(kw_only=True)
class TrainingData:
    """Section ``[data]``, as far as a page describes it."""

    train: tuple[str, ...] = ()
    train_weights: tuple[float, ...] = ()
    seq_length: int | None = None


@attrs.frozen(kw_only=True)
class RecordedConfig:
    """The resolved config, as far as a page describes it."""

    platform: str | None = None
    model: ModelSize = ModelSize()
    train: TrainLength = TrainLength()
    data: TrainingData = TrainingData()


@attrs.frozen(kw_only=True)
class LockedPlugin:
    """A plugin in ``plugins.lock.json``."""

    distribution: str = ""
    version: str = ""
    sha256: str = ""


@attrs.frozen(kw_only=True)
class FileIdentity:
    """Size and content of a data file."""

    size_bytes: int | None = None
    sha256_of_ends: str = ""


@attrs.frozen(kw_only=True)
class RecordedEnvironment:
    """``environment.json``; runs of earlier versions have none."""

    versions: Mapping[str, str] = attrs.field(factory=dict)
    device: Mapping[str, object] = attrs.field(factory=dict)
    """Names and numbers, which are only compared."""
    machine_choices: Mapping[str, str] = attrs.field(factory=dict)
    data: Mapping[str, Mapping[str, FileIdentity | None]] = attrs.field(factory=dict)
    """Prefix of a dataset -> ``bin`` or ``idx`` -> its content; None: not readable."""


@attrs.frozen(kw_only=True)
class RunEvent:
    """A line of ``metrics.jsonl`` about the run: start, resume, finish or failure."""

    event: str = ""
    step: int | None = None
    error: str = ""


@attrs.frozen(kw_only=True)
class DatasetSize:
    """A line of ``log.jsonl`` about what a task read of its files."""

    files: tuple[str, ...] = ()
    samples: int | None = None
    """Of one epoch."""
    tokens: int | None = None
    left_out: tuple[str, ...] = ()
    """Why conversations were left out, one sentence a reason."""


@attrs.frozen(kw_only=True)
class LogEvent:
    """A line of ``log.jsonl``."""

    level: str = ""
    event: str = ""
    rank: str = ""
    time: float | None = None
    """Seconds since 1970."""
    exception: str = ""
    """Traceback."""
    fields: Mapping[str, object] = attrs.field(factory=dict)
    """Everything else of the line."""
