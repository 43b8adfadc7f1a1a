"""The interface between the kit and the system under test: run one trial on existing ranks.

The kit does not depend on core. A runtime is installed as the entry point ``default`` of the group
``ascend_run.runtime``; the built-in one is ``ascend_run.testing.kit:KitRuntime``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.plugin_api.manifest import Manifest
    from ascend_run.types.declarations import Numerics

    from .effects import CollectiveCall
    from .gradients.differences import Derivative

RUNTIME_GROUP: Final = "ascend_run.runtime"
PLATFORM_VARIABLE: Final = "ASCEND_RUN_TEST_PLATFORM"
"""Platform of trials that do not set one; default: cpu."""


@attrs.frozen(kw_only=True)
class Trial:
    """A tiny run."""

    plugins: tuple[str, ...] = ()
    """Features to enable, by name."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """Config key (``model.num_layers``) -> value."""
    dtype: str = "float64"
    """Dtype of parameters and activations in a trial without steps."""
    steps: int = 0
    """Optimizer steps, in float32. 0 stops at the gradients of the first global batch."""
    counted: bool = True
    """Count operations and collectives of the last forward and backward, which then take twice as
    long."""
    by_differences: tuple[str, ...] = ()
    """What to compare with differences, in a trial without steps: ``parameters`` (gradients of the
    loss) and ``functions`` (backward of autograd functions) on one rank, ``attention`` (backward of
    the first layer's kernel); and with its formula, ``formula`` (forward of that kernel), on one
    rank."""
    probe_weights: bool = True
    """Change weights of models with experts as ``DryRun`` does, for equal router scores. These have
    no derivative, so a trial ``by_differences``, and those that it is compared with, leave it
    out."""
    checkpoints: str = ""
    """Folder to resume from, if it has a checkpoint, and to save to after the last step; empty: no
    checkpoints. Requires ``steps``, which include those before the checkpoint; they run in the
    training loop, which logs each."""
    evaluates: bool = False
    """Evaluate before the first and after the last step, in a trial with ``checkpoints``."""
    listens_to: str = ""
    """Plugin whose listeners are watched."""


@attrs.frozen(kw_only=True)
class Shard:
    """One rank's shard of a parameter or its gradient."""

    name: str
    """Name of the parameter in the whole model, the same in every layout."""
    tensor: Tensor | None
    """None if a parameter that requires a gradient has none."""
    offset: tuple[int, ...]  #: First index of the shard, per axis.
    global_shape: tuple[int, ...]  #: Of the whole parameter.


@attrs.frozen(kw_only=True)
class RankOutcome:
    """The result of a trial on one rank."""

    losses: tuple[float, ...]
    """Mean over the global batch, per step; without steps, one loss."""
    grad_norms: tuple[float, ...]
    """Before clipping, per step."""
    shards: tuple[Shard, ...]
    """Shards of the reduced gradients; after steps, of the weights."""
    collectives: Mapping[str, int] = attrs.field(factory=dict)
    """Operation of ``torch.ops.c10d`` -> calls on this rank in the last forward and backward.
    Empty, like ``sent_bytes``, ``operations`` and ``collective_calls``, if a trial is not
    ``counted``."""
    sent_bytes: Mapping[str, int] = attrs.field(factory=dict)
    """Operation of ``torch.ops.c10d`` -> bytes of the input tensors."""
    operations: Mapping[str, int] = attrs.field(factory=dict)
    """Operation of torch's dispatcher -> calls in the last forward and backward."""
    undeclared_attention: frozenset[str] = frozenset()
    """Without steps: features (fields of AttentionFeatures) that the attention kernel was called
    with and that neither an option nor a manifest of the trial's plugins needs."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Values of ``ascend_metrics``, by ``<group>/<name>``."""
    readings: Sequence[Mapping[str, Any]] = ()
    """With ``checkpoints``: the same values as logged after each step."""
    listener_calls: Mapping[str, int] = attrs.field(factory=dict)
    """With ``listens_to``: calls of each method that is a listener or has the name of one."""
    unnamed_errors: Sequence[str] = ()
    """With ``listens_to``: called listeners in which an error does not name the plugin."""
    collective_calls: Sequence[CollectiveCall] = ()
    """Every call that ``collectives`` counts, with the ranks of its group."""
    derivatives: Sequence[Derivative] = ()
    """With ``by_differences``: gradients by parameter, or by group of parameters, and by term of
    the loss; of functions and of the attention by input."""
    attention_errors: Mapping[str, float] = attrs.field(factory=dict)
    """With ``formula`` in ``by_differences``: what the attention kernel computed -> relative error
    of its output."""
    estimated: Sequence[str] = ()
    """With ``by_differences``: functions that declare that their backward is not the derivative,
    with the reasons; then parameters are not compared."""
    state: Mapping[str, Tensor] = attrs.field(factory=dict)
    """With ``checkpoints``: all tensors of this rank in the checkpoint, by key and offset: weights,
    optimizer state, random number generators, entries of plugins."""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    """With ``checkpoints``: the JSON values of the checkpoint."""


@attrs.frozen(kw_only=True)
class OptionFacts:
    """One option of a plugin."""

    name: str
    type: str
    help: str
    """The docstring below the field; empty if there is none."""


@attrs.frozen(kw_only=True)
class PluginFacts:
    """Data of an installed plugin that is known without running it."""

    plugin: type[Any]
    kind: str
    """``feature``, ``platform``, ``task`` or ``model family``."""
    distribution: str
    """Name of the distribution that installed it."""
    entry_points: Mapping[str, str]
    """Name -> ``package.module:Class`` of every installed plugin."""
    hooks: frozenset[str]
    """Hooks that it implements."""
    hook_problems: Sequence[str]
    """Problems of its hook implementations, such as unknown hooks."""
    options: Sequence[OptionFacts]

    @property
    def manifest(self) -> Manifest:
        manifest: Manifest = self.plugin.manifest
        return manifest


@attrs.frozen
class Examined:
    """The result of planning a trial."""

    problems: Sequence[str] = ()
    """Why it cannot start; empty if it can."""
    idle: frozenset[str] = frozenset()
    """Plugins that declare to be idle in it."""


@attrs.frozen
class FamilyOutcome:
    """A model family compared with transformers."""

    problems: Sequence[str] = ()
    not_compared: str = ""
    """Why there was no comparison; empty if there was one."""
    moved: Sequence[str] = ()
    """Options of config.json that had another value than their default; sizes are not options."""


class Runtime(Protocol):
    """Runs trials."""

    def describe(self, plugin: str) -> PluginFacts:
        """Import an installed plugin of any kind and return its data.

        Raises:
            AscendRunError: It is unknown or cannot be used.
        """
        ...

    def examine(self, trial: Trial, world_size: int) -> Examined:
        """Plan a trial without running it; called in the process of the tests."""
        ...

    def numerics_of(self, plugin: str) -> Numerics:
        """Return the numerics that a plugin's manifest declares; called in the process of the
        tests."""
        ...

    def against_transformers(self, family: str, folder: str) -> FamilyOutcome:
        """Compare random tiny models of a family with transformers, in float64.

        Called on one rank of an initialized default process group.

        Args:
            folder: For their files.
        """
        ...

    def run(self, trial: Trial, at_end: Callable[[], None] | None = None) -> RankOutcome:
        """Build the model from the config's seed, and run it on ``testing.models.samples``.

        Called on every rank of an initialized default process group. Weights and batches may depend
        on the config but not on the layout or the plugins.

        Args:
            at_end: Called after the last step, before the run is torn down.
        """
        ...


def load_runtime() -> Runtime:
    """Load the installed runtime.

    Raises:
        LookupError: Not exactly one runtime is installed.
    """
    found = _runtimes(tuple(sys.path))
    if len(found) != 1:
        raise LookupError(f"expected one entry point 'default' in {RUNTIME_GROUP}, got {found}")
    (entry,) = found
    runtime: Runtime = entry.load()()
    return runtime


@functools.cache  # every trial asks for it, and reading all entry points takes 0.05 s
def _runtimes(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the runtimes that distributions on a ``sys.path`` provide."""
    return tuple(entry_points(group=RUNTIME_GROUP, name="default"))


def run_trial(trial: Trial) -> RankOutcome:
    """Run one trial on this rank, as a job of the pool."""
    return load_runtime().run(trial)
