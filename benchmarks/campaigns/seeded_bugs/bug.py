"""One seeded bug: the patch, the run in which it shows, and where it sits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
RESUME: Final = "resume"


@attrs.frozen(kw_only=True)
class Bug:
    """A patch of the code that runs.

    Both runs that ``verify`` compares have it, as both would in life: what is found is found by
    the difference that it makes between layouts, or between a run with a plugin and one without.
    """

    name: str
    what: str
    """The kind of mistake, in one line."""
    target: str
    """``package.module:Class.method``."""
    old: str
    """Stands once in the function's source."""
    new: str
    plugins: tuple[str, ...] = ()
    layout: Mapping[str, int] = attrs.field(factory=dict)
    """``tp``, ``sp``, ``pp``, ``vpp``, ``cp``, ``ep``, ``expt_tp``, ``dp``."""
    model: str = "dense"
    """A key of the kit's MODELS."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """More config keys, options of plugins among them."""
    resume: bool = False
    """Whether it takes ``--resume`` to see it."""
    modules: str
    """Regular expression: the modules of the whole model that naming the place may name."""
    phases: tuple[str, ...]
    """Where in a step the patched code computes what is wrong first: a value of the model or of the
    batch, a gradient, or an update. Told by the patch, not by what ``verify`` says of it."""
    hides_from_loss: bool = False
    """Whether the loss of the first step is what it should be all the same."""
