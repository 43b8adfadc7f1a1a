"""The records of a plan's cost, with the keys of the section ``cost`` of ``plan.json``.

docs/cost-model.md describes them. Unit: bytes, FLOPs and seconds of one optimizer step on one rank.
"""

from __future__ import annotations

import attrs

from ascend_run.prepare.plan.records import Plan


@attrs.frozen(kw_only=True)
class StageMemory:
    """Bytes of one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    host: int
    """On the host, at its own peak."""
    moment: str
    """When the peak is reached."""

    @property
    def parts(self) -> dict[str, int]:
        """Label -> bytes of the parts of the peak."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "buffers": self.buffers,
        }


@attrs.frozen(kw_only=True)
class StageCommunication:
    """Calls of one operation over one process group; see ``types.cost.Communication``."""

    operation: str
    group: str
    group_size: int
    calls: int
    sent_bytes: int
    overlapped: bool
    why: str
    seconds: float | None = None
    """None without a device."""


@attrs.frozen(kw_only=True)
class GroupOptions:
    """Options of the communicator of a process group; see ``types.device.CommOptions``."""

    group: str
    buffer_mb: int
    why: str


@attrs.frozen(kw_only=True)
class StageCost:
    """Estimate of each rank of one pipeline stage."""

    pp: int
    ranks: int
    """Number of ranks of the stage."""
    layers: int
    """Number of its layers."""
    parameters: int
    trained_parameters: int
    memory: StageMemory
    communication: tuple[StageCommunication, ...]
    flops: float
    """Of the hardware, which includes what is recomputed."""
    model_flops: float
    changed_by: tuple[str, ...]
    """Plugins that change the plain model's estimate."""


@attrs.frozen(kw_only=True)
class ExpectedTime:
    """Seconds of one step on a device."""

    device: str
    source: str
    """Where the device's rates come from."""
    matmuls: float
    memory: float
    operations: float
    communication: float
    """Exposed communication."""
    host_copies: float
    """Exposed copies between the device and the host."""
    disk: float = 0.0
    """Reads and writes of files."""
    bubble: float
    step: float
    """The sum of the seven above."""
    tokens_per_second: float
    mfu: float
    """Fraction of the device's peak that the model's FLOPs use."""
    memory_bytes: float
    """Memory of the device."""
    fits: bool

    @property
    def parts(self) -> dict[str, float]:
        """Label -> seconds of the parts of a step."""
        return {
            "matmuls": self.matmuls,
            "memory": self.memory,
            "kernel launches": self.operations,
            "exposed communication": self.communication,
            "exposed copies to the host": self.host_copies,
            "disk": self.disk,
            "bubble": self.bubble,
        }


@attrs.frozen(kw_only=True)
class Cost:
    """The estimated cost of a run."""

    unit: str
    tokens: int
    """Tokens of one step on all ranks."""
    stages: tuple[StageCost, ...]
    time: ExpectedTime | None = None
    """None without a device."""
    groups: tuple[GroupOptions, ...] | None = None
    """Process groups whose options plugins set; None if there are none."""
    notes: tuple[str, ...] | None = None
    """What plugins note about their changes; None if there is nothing."""


@attrs.frozen(kw_only=True)
class CostedPlan(Plan):
    """A plan with its cost."""

    cost: Cost


def cost_of(plan: Plan) -> Cost | None:
    """Return the cost of a plan; None for a plan without costs."""
    return plan.cost if isinstance(plan, CostedPlan) else None
