"""What the kit asks of the system under test: one trial run on the ranks that are there.

The kit knows no core. Whoever has a runtime offers it as the entry point ``default`` of the group
``ascend_run.runtime``; ours is ``ascend_run.entrypoints.kit:KitRuntime``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.plugin_api.manifest import Numerics

RUNTIME_GROUP: Final = "ascend_run.runtime"


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


@attrs.frozen(kw_only=True)
class Piece:
    """The part of one parameter's tensor that a rank holds."""

    name: str
    """Of the parameter in the whole model, the same in every layout."""
    tensor: Tensor
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
    missing: tuple[str, ...]
    """Parameters that need a gradient and got none."""
    collectives: Mapping[str, int]
    """Operation of ``torch.ops.c10d`` -> calls on this rank in the last forward and backward."""
    sent_bytes: Mapping[str, int]
    """The same -> bytes put in."""
    operations: Mapping[str, int]
    """Every operation of torch's dispatcher there -> calls."""
    metrics: Mapping[str, float]
    """What plugins answered to ``ascend_metrics``, ``<group>/<name>``."""


class Runtime(Protocol):
    """Makes trials."""

    def numerics_of(self, plugin: str) -> Numerics:
        """What a plugin's manifest declares; called in the process of the tests."""
        ...

    def run(self, trial: Trial) -> RankOutcome:
        """Build the model from the config's seed, and run ``testing.models.samples`` through it.

        Called on every rank of an initialised default process group. Weights and batches may
        depend on the config but not on the layout or the plugins.
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
