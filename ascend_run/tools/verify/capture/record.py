"""The record of one rank's probes, and its files: tensors as safetensors, the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from torch import Tensor

from ascend_run.testing.gradients.differences import Derivative

from .activity import Activity
from .case_record import CaseRecord
from .mask_record import DropoutMask
from .moments import Moments

SCHEMA = 1
SCHEDULE: Final = "the schedule"
OF_OPTIMIZER: Final = "the optimizer's"
"""Begin of the names of what a step changes, besides parameters."""
_BY_NAME: Final = ("expert_biases", "first_samples", "samples")
"""Fields of a record that are tensors by name."""


@attrs.frozen(kw_only=True)
class RecordedShard:
    """One rank's shard of a parameter."""

    name: str
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    trains: bool
    """Whether it requires a gradient."""
    should_train: bool | None = None
    """Whether it should train, as plugins declare; None if nothing is declared."""

    @property
    def is_trained(self) -> bool:
        """``should_train``, or ``trains`` if nothing is declared."""
        return self.trains if self.should_train is None else self.should_train


@attrs.define(kw_only=True)
class Record:
    """What one rank recorded."""

    rank: int
    coordinates: Mapping[str, int]
    """``tp``, ``pp``, ``cp``, ``dp``, ``ep``."""
    sizes: Mapping[str, int]
    places: Sequence[RecordedShard] = ()
    """This rank's shards; the sequences of tensors below are in the same order."""
    initial: Sequence[Tensor] = ()
    expert_biases: Mapping[str, Tensor] = attrs.field(factory=dict)
    """``expert_bias`` of each router, at first."""
    gradients: Sequence[Tensor | None] = ()
    """float64; gradients of the mean loss over the first global batch."""
    loss: float = float("nan")
    num_tokens: int = 0
    micro_batches: int = 0
    """Forwards of this rank's first chunk."""
    weights: Sequence[Sequence[Tensor]] = ()
    """float32, after each step."""
    losses: Sequence[float] = ()
    grad_norms: Sequence[float] = ()
    step_tokens: Sequence[int] = ()
    peaks: Sequence[float] = ()
    """For each shard, the largest clipped gradient in any optimizer step; -1 if there never was
    one."""
    step_gradients: Sequence[Sequence[Sequence[float] | None]] = ()
    """Of each step, before clipping: for each shard, the ``projections`` of its float32 gradient;
    None if it has none. Empty if they were not recorded."""
    stale: Sequence[str] = ()
    """Parameters that differ from the optimizer's master weights after the steps."""
    rates: Mapping[str, Sequence[float]] = attrs.field(factory=dict)
    """Parameter -> its weight decay and its learning rate in each step, as its group has them on
    this rank; empty if the optimizer does not expose its groups."""
    num_masters: int = 0
    """Number of parameters that the optimizer has a copy of."""
    generators: Mapping[str, str] = attrs.field(factory=dict)
    """Random number generator -> fingerprint of its state after the steps."""
    changed_by_overflow: Sequence[str] | None = None
    """What a step changed after those of the run, whose gradients were infinite; None if there was
    none."""
    masks: Sequence[DropoutMask] = ()
    """Of one global batch, in order."""
    activity: Activity = attrs.field(factory=Activity)
    cases: CaseRecord = attrs.field(factory=CaseRecord)
    forward: dict[int, dict[str, Moments]] = attrs.field(factory=dict)
    """Index of the chunk in the model -> ``module|in or out|which tensor``, in execution order."""
    backward: dict[int, dict[str, Moments]] = attrs.field(factory=dict)
    derivatives: Sequence[Derivative] = ()
    """Gradients compared with differences of the loss, if they were asked for."""
    wrong_backward: str | None = None
    """If one of them is wrong: the module that computes a wrong gradient from a right one."""
    first_samples: Mapping[str, Tensor] = attrs.field(factory=dict)
    """Field -> [samples, S], of the global batch of the gradients; empty unless asked for."""
    samples: Mapping[str, Tensor] = attrs.field(factory=dict)
    """The same of all steps."""


def write_record(record: Record, folder: Path) -> None:
    """Write two files named after the rank.

    They need no checksum: the folder is private and temporary; the command that created it reads it
    once and removes it.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    readings = {"initial": record.initial, "gradients": record.gradients}
    readings |= {f"weights.{step}": values for step, values in enumerate(record.weights)}
    for reading, values in readings.items():
        for index, value in enumerate(values):
            if value is not None:
                tensors[f"{reading}/{index}"] = value.detach().cpu().contiguous()
    for kind in _BY_NAME:
        fields: Mapping[str, Tensor] = getattr(record, kind)
        tensors |= {f"{kind}/{name}": field.contiguous() for name, field in fields.items()}
    save_file(tensors, str(folder / f"rank-{record.rank}.safetensors"))
    data = {
        "schema": SCHEMA,
        **{
            name: getattr(record, name)
            for name in (
                "rank",
                "coordinates",
                "sizes",
                "loss",
                "num_tokens",
                "micro_batches",
                "losses",
                "grad_norms",
                "step_tokens",
                "peaks",
                "step_gradients",
                "stale",
                "rates",
                "num_masters",
                "generators",
                "wrong_backward",
                "changed_by_overflow",
            )
        },
        "places": [attrs.asdict(place) for place in record.places],
        "masks": [attrs.asdict(mask) for mask in record.masks],
        "activity": attrs.asdict(record.activity),
        "cases": attrs.asdict(record.cases),
        "steps": len(record.weights),
        "derivatives": [attrs.asdict(derivative) for derivative in record.derivatives],
        "forward": _moments_data(record.forward),
        "backward": _moments_data(record.backward),
    }
    (folder / f"rank-{record.rank}.json").write_text(json.dumps(data))


def read_records(folder: Path, world_size: int) -> list[Record]:
    """Read all records, by rank."""
    return [_read(folder, rank) for rank in range(world_size)]


def _read(folder: Path, rank: int) -> Record:
    from safetensors.torch import load_file

    tensors = load_file(str(folder / f"rank-{rank}.safetensors"))
    data: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    places = [
        RecordedShard(
            name=place["name"],
            offset=tuple(place["offset"]),
            global_shape=tuple(place["global_shape"]),
            trains=place["trains"],
            should_train=place["should_train"],
        )
        for place in data.pop("places")
    ]
    steps, _ = data.pop("steps"), data.pop("schema")
    activity, cases = Activity(**data.pop("activity")), CaseRecord.of_data(data.pop("cases"))

    def reading(name: str) -> list[Any]:
        return [tensors.get(f"{name}/{index}") for index in range(len(places))]

    forward, backward = data.pop("forward"), data.pop("backward")
    derivatives = [Derivative(**derivative) for derivative in data.pop("derivatives")]
    masks = [DropoutMask(**mask) for mask in data.pop("masks")]
    by_name: dict[str, Any] = {kind: _below(tensors, f"{kind}/") for kind in _BY_NAME}
    return Record(
        **data,
        masks=masks,
        activity=activity,
        cases=cases,
        places=places,
        derivatives=derivatives,
        initial=reading("initial"),
        gradients=reading("gradients"),
        weights=[reading(f"weights.{step}") for step in range(steps)],
        forward=_moments_of(forward),
        backward=_moments_of(backward),
        **by_name,
    )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def _moments_data(by_chunk: dict[int, dict[str, Moments]]) -> Any:
    return [
        [
            chunk,
            [
                [key, [[m, *row] for m, row in moments.rows.items()]]
                for key, moments in seen.items()
            ],
        ]
        for chunk, seen in by_chunk.items()
    ]


def _moments_of(data: Any) -> dict[int, dict[str, Moments]]:
    return {
        chunk: {key: Moments(rows={row[0]: row[1:] for row in rows}) for key, rows in seen}
        for chunk, seen in data
    }
