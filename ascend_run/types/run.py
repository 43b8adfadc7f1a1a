"""The state of a run, and what plugins contribute to it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import attrs

from .data import ArrayCache, FrozenPass, NoCache

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import nn

    from .config import RunConfig
    from .device import Device
    from .forward import ForwardLink
    from .layout import Layout
    from .optimizer import OptimizerSpec

T = TypeVar("T")
Wrapper = Callable[[T], T]
"""What a wrapper hook returns: a function from the inner object to the outer one."""

ModuleWrapper: TypeAlias = Callable[[Any], "nn.Module | ForwardLink | Mapping[str, ForwardLink]"]
"""What a wrapper hook of a module returns: a function from the module to a link around its forward,
to links around the forwards of its submodules by name (``""``: its own), or to the module that
replaces it."""


class RunPhase(enum.StrEnum):
    """What a rank does. Forwards and backwards of pipeline stages alternate; an evaluation has
    forwards in it."""

    MODEL = "model"  #: Builds one model: weights and gradient buffers are allocated.
    OPTIMIZER = "optimizer"  #: Builds its optimizer: master weights are allocated.
    FORWARD = "forward"  #: Of one micro-batch through one model chunk, with the loss.
    BACKWARD = "backward"  #: Likewise; gradients may be reduced meanwhile.
    REFERENCE = "reference"
    """Forwards of a step's micro-batches through a frozen model, or through the trained one as it
    was before training: what a plugin trains beside frozen weights is off."""
    REDUCTION = "reduction"  #: Of gradients, after the last backward.
    UPDATE = "update"  #: Of the weights; the first one allocates the optimizer's states.
    EVALUATION = "evaluation"  #: Over all its batches.
    CHECKPOINT = "checkpoint"  #: Is saved or loaded.


@attrs.define
class ModelBundle:
    """One model of a run and its role (``policy``, ``reference``, ...)."""

    role: str  #: ``policy``, ``reference`` ...
    chunks: list[nn.Module]
    """Megatron's virtual pipeline chunks, wrapped in DDP if the model is trained."""
    transformer_config: TransformerConfig  #: The Megatron TransformerConfig that it was built with.
    config: RunConfig  #: The run's, with the model fields of its role.
    optimizer: MegatronOptimizer | None = None  #: None if not trained.
    optimizer_spec: OptimizerSpec | None = None
    """What ``optimizer`` was built from; its ``states`` are checkpointed."""
    scheduler: OptimizerParamScheduler | None = None  #: None if not trained.
    weights: str | None = None  #: Hugging Face folder of its initial weights.
    frozen: bool = False  #: Whether it is never trained, nor saved.

    @property
    def trains(self) -> bool:
        """Whether an optimizer updates its weights."""
        return self.optimizer is not None


@attrs.define
class RunContext:
    """The state of a run on one rank: the argument of listeners and tasks."""

    config: RunConfig  #: Resolved.
    layout: Layout  #: Of the run, with this rank.
    device: Device  #: This rank's.
    groups: ProcessGroupCollection  #: Megatron's ProcessGroupCollection.
    models: dict[str, ModelBundle] = attrs.field(factory=dict)  #: Role -> model; may be empty.
    step: int = 0  #: Completed optimizer steps.
    consumed_samples: int = 0  #: Unit: sequences since step 0.
    cache: ArrayCache = attrs.field(factory=NoCache)
    """Cache of arrays that are computed once for all ranks, such as the samples of a task."""
    frozen_pass: FrozenPass | None = None  #: None until the models are built.


MetricValue: TypeAlias = float | Sequence[float] | Sequence[Sequence[float]]
"""One value of a logged step: a number (``loss``), a list of numbers (``expert_load``), or a list
of lists (``expert_load_by_layer``)."""


class Metrics(Protocol):
    """Values that a plugin adds to the log; called on every rank at each logged step."""

    def __call__(self, context: RunContext) -> Mapping[str, MetricValue]:
        """Return name -> value of this rank; the log has rank 0's."""
        ...


@attrs.frozen(kw_only=True)
class ReportPanel:
    """A chart that a plugin adds to ``report.html``."""

    title: str  #: Its heading.
    metrics: tuple[str, ...]  #: Names in the metrics log.
    unit: str = ""  #: Of the values, on the axis.
    areas: str | None = None
    """Name of a JSON-lines file of the run folder, drawn as stacked areas in place of metrics. Each
    line has ``step``, ``seconds``, ``phase`` (text) and ``values`` (name -> number)."""
    table: str | None = None
    """Name of such a file that is shown as tables. Each line is a row: ``title`` of its table, and
    ``values`` (column -> text or number)."""


def _hashes(given: str | Iterable[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@attrs.frozen(kw_only=True)
class Patch:
    """Replacement of a function of another package for the duration of a run; the last resort."""

    target: str  #: ``package.module:attribute.path``.
    replacement: Any  #: What the target becomes; see ``wraps``.
    why: str  #: Reason, for the log and ``plan``.
    versions: str
    """Versions of the target's distribution that the patch was checked against (PEP 440)."""
    source_hash: tuple[str, ...] = attrs.field(converter=_hashes)
    """First 16 hex digits of the SHA-256 of the target's source, a function or class: one hash, or
    one for each variant among the versions. None only for targets without Python source: values,
    modules, C functions."""
    until: str  #: Upstream change that makes the patch unnecessary.
    group: str = attrs.field()  #: Patches that are counted together; default: the target's package.
    wraps: bool = False
    """Whether ``replacement`` maps the target to its replacement, rather than being it."""
    missing_ok: bool = False
    """Whether the target may be missing; it is then defined for the duration of the run."""

    @group.default
    def _package_as_group(self) -> str:
        return self.package

    @property
    def package(self) -> str:
        """The top-level package of the target."""
        return self.target.partition(":")[0].partition(".")[0]
