"""What the kit asks of the system under test: one trial run on the ranks that are there.

The kit knows no core. Whoever has a runtime offers it as the entry point ``default`` of the group
``ascend_run.runtime``; ours is ``ascend_run.entrypoints.kit:KitRuntime``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.plugin_api.manifest import Manifest, Numerics

    from .effects import SentMessage

RUNTIME_GROUP: Final = "ascend_run.runtime"
PLATFORM_VARIABLE: Final = "ASCEND_RUN_TEST_PLATFORM"
"""Names the platform of trials that name none; without it they run on the CPU."""


@attrs.frozen(kw_only=True)
class Trial:
    """A run small enough to be made many times."""

    plugins: tuple[str, ...] = ()
    """Features to enable, by name."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """Config key (``model.num_layers``) -> value."""
    dtype: str = "float64"
    """Of parameters and activations, where the trial stops before the optimizer."""
    steps: int = 0
    """Optimizer steps, in float32. 0 stops at the gradients of the first global batch."""
    counted: bool = True
    """Count what the last forward and backward call and send; they take twice as long for it."""
    checkpoints: str = ""
    """Folder to go on from, where it holds a checkpoint, and to save to after the last step; empty
    does neither. Only with steps, which count from the run's beginning."""


@attrs.frozen(kw_only=True)
class Piece:
    """The part of one parameter's tensor that a rank holds."""

    name: str
    """Of the parameter in the whole model, the same in every layout."""
    tensor: Tensor | None
    """None where there is nothing to read: a parameter that needs a gradient and got none."""
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]


@attrs.frozen(kw_only=True)
class RankOutcome:
    """What one rank knows after a trial."""

    losses: tuple[float, ...]
    """Mean over the global batch, one a step (one where there was no step)."""
    grad_norms: tuple[float, ...]
    """Before clipping, one a step."""
    pieces: tuple[Piece, ...]
    """Gradients, reduced as training reduces them; after steps, weights."""
    collectives: Mapping[str, int] = attrs.field(factory=dict)
    """Operation of ``torch.ops.c10d`` -> calls on this rank in the last forward and backward.
    Empty, like the next two and ``messages``, where a trial is not ``counted``."""
    sent_bytes: Mapping[str, int] = attrs.field(factory=dict)
    """The same -> bytes put in."""
    operations: Mapping[str, int] = attrs.field(factory=dict)
    """Every operation of torch's dispatcher there -> calls."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """What plugins answered to ``ascend_metrics``, ``<group>/<name>``."""
    messages: Sequence[SentMessage] = ()
    """Every call that ``collectives`` counts, with the ranks of its group."""
    state: Mapping[str, Tensor] = attrs.field(factory=dict)
    """With ``checkpoints``: all that a checkpoint holds of this rank, by name and place: weights,
    the optimizer's state, random generators, entries of plugins."""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    """The same, of what is no tensor."""


@attrs.frozen(kw_only=True)
class OptionFacts:
    """One option of a plugin."""

    name: str
    type: str
    help: str
    """The documentation below the field; empty where there is none."""


@attrs.frozen(kw_only=True)
class PluginFacts:
    """What is known of an installed plugin without running it."""

    plugin: type[Any]
    kind: str
    """``feature``, ``platform``, ``task`` or ``model family``."""
    distribution: str
    """Name of what installed it."""
    entry_points: Mapping[str, str]
    """Name -> ``package.module:Class``, of every plugin that is installed."""
    hooks: frozenset[str]
    """That it implements."""
    hook_problems: Sequence[str]
    """Implementations that would never be called, or in a race with another plugin's."""
    options: Sequence[OptionFacts]

    @property
    def manifest(self) -> Manifest:
        manifest: Manifest = self.plugin.manifest
        return manifest


@attrs.frozen
class Examined:
    """What planning says of a trial."""

    problems: Sequence[str] = ()
    """Why it cannot start; none where it can."""
    idle: frozenset[str] = frozenset()
    """Plugins that declare that they change nothing in it."""


class Runtime(Protocol):
    """Makes trials."""

    def describe(self, plugin: str) -> PluginFacts:
        """Import an installed plugin, of any kind, and say what it is.

        Raises:
            AscendRunError: It is unknown, or cannot be used; with the reason.
        """
        ...

    def examine(self, trial: Trial, world_size: int) -> Examined:
        """Plan a trial, in the process of the tests; nothing runs."""
        ...

    def numerics_of(self, plugin: str) -> Numerics:
        """What a plugin's manifest declares; called in the process of the tests."""
        ...

    def run(self, trial: Trial, at_end: Callable[[], None] | None = None) -> RankOutcome:
        """Build the model from the config's seed, and run ``testing.models.samples`` through it.

        Called on every rank of an initialised default process group. Weights and batches may
        depend on the config but not on the layout or the plugins.

        Args:
            at_end: Called after the last step, while everything that the run set up stands.
        """
        ...


def load_runtime() -> Runtime:
    """The installed runtime.

    Raises:
        LookupError: None is installed, or more than one.
    """
    found = entry_points(group=RUNTIME_GROUP, name="default")
    if len(found) != 1:
        raise LookupError(f"expected one entry point 'default' in {RUNTIME_GROUP}, got {found}")
    (entry,) = found
    runtime: Runtime = entry.load()()
    return runtime


def run_trial(trial: Trial) -> RankOutcome:
    """The pool's job: one trial on this rank."""
    return load_runtime().run(trial)
