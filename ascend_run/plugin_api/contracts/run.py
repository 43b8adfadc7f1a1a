"""A run under way: its models, and what plugins say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import attrs

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.plugin_api.config import RunConfig
    from ascend_run.plugin_api.layout import Layout

    from .device import Device

T = TypeVar("T")
Wrapper = Callable[[T], T]
"""What a wrapper hook answers: from the inner thing to the outer one."""


@attrs.define
class ModelBundle:
    """One model of a run, in its role (``policy``, ``reference``, ...)."""

    role: str
    chunks: list[nn.Module]
    """Megatron's virtual pipeline chunks, wrapped for data parallelism where it trains."""
    transformer_config: Any
    """The megatron TransformerConfig it was built with."""
    optimizer: Any = None
    scheduler: Any = None

    @property
    def trains(self) -> bool:
        """Whether an optimizer moves its weights."""
        return self.optimizer is not None


@attrs.define
class RunContext:
    """A run under way: what events and tasks are given."""

    config: RunConfig
    layout: Layout
    device: Device
    groups: Any
    """Megatron's ProcessGroupCollection."""
    models: dict[str, ModelBundle] = attrs.field(factory=dict)
    """Role -> model; nothing assumes that there is one."""
    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0


Reading: TypeAlias = float | Sequence[float]
"""One value of a logged step: a number (``loss``), or one for each of several (``expert_load``)."""


class Metrics(Protocol):
    """Readings of a step that a plugin adds to the log, called once a logged step on every rank."""

    def __call__(self, context: RunContext) -> Mapping[str, Reading]: ...


@attrs.frozen(kw_only=True)
class ReportPanel:
    """A plugin's own curve in ``report.html``."""

    title: str
    metrics: tuple[str, ...]
    """Names in the metrics log."""
    unit: str = ""


@attrs.frozen(kw_only=True)
class Patch:
    """Somebody else's function replaced for the length of a run; the last resort."""

    target: str
    """``package.module:attribute.path``."""
    replacement: Any
    why: str
    versions: str
    """Versions of the target's distribution that it was checked against (PEP 440)."""
    source_hash: str | None
    """First 16 hex digits of SHA-256 of the target's source; None for what has no source."""
    until: str
    """What must happen upstream for this patch to go."""
