"""Checkpoints gathered to one writer per data-parallel group, without gloo groups."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ascend_run.plugin_api import (
    CheckpointStore,
    LegacyFlag,
    Manifest,
    Maturity,
    Metrics,
    Numerics,
    RunContext,
    Support,
    Wrapper,
    hookimpl,
)

_MOST_ELEMENTS = 2**30


@attrs.frozen(kw_only=True)
class GlooOffloadConfig:
    """Options, set by ``plugins.gloo-offload.<field>=<value>``."""

    slice_elements: int = attrs.field(
        default=10 * 1024 * 1024,
        validator=attrs.validators.and_(
            attrs.validators.ge(1), attrs.validators.le(_MOST_ELEMENTS)
        ),
    )
    """Maximum elements per send, which bounds the device memory of a save or a load. Unit:
    elements."""
    check_replicas: bool = False
    """Before a save, compare the replicas that the ranks of a group hold, by SHA-256."""


@attrs.define
class Traffic:
    """Sends and receives of this rank for checkpoints since the run started."""

    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class GlooOffload:
    """Write and read the files of a checkpoint on one rank of each data-parallel group.

    Cost: each shard of another rank is sent once; device memory of one slice. Numerics: bitwise
    neutral. Source: the behaviour of MindSpeed's ``--disable-gloo-group``.
    """

    manifest = Manifest(
        name="gloo-offload",
        aliases=("gloo-free-save",),
        summary="gather checkpoints to one rank per group in slices, without gloo groups",
        exercised_by="verify it in a layout with dp=2: one rank gathers from no other",
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--disable-gloo-group"),
            LegacyFlag(
                flag="--hccl-slice-size", key="plugins.gloo-offload.slice_elements", values=None
            ),
        ),
        source="MindSpeed, docs/features/hccl-replace-gloo.md",
    )
    config_class = GlooOffloadConfig

    def __init__(self, config: GlooOffloadConfig) -> None:
        self.config = config
        self.traffic = Traffic()

    @hookimpl
    def ascend_checkpoint_transfer(self, context: RunContext) -> Wrapper[CheckpointStore] | None:
        group = context.groups.dp_cp
        if group.size() == 1:
            return None
        from .channel import Channel
        from .gathering import GatheringStore

        channel = Channel(group, context.device, self.config.slice_elements, self.traffic)
        return lambda store: GatheringStore(
            store, channel, check_replicas=self.config.check_replicas
        )

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"gloo-offload": self._readings}

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        return {name: float(count) for name, count in attrs.asdict(self.traffic).items()}
