"""Model families; those with ALiBi share the hook that adds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ascend_run.families import FamilyPlugin
from ascend_run.plugin_api import AttentionFeatures, Device, PositionBias, RunConfig, hookimpl

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

ALIBI: Final = AttentionFeatures(position_bias=True)
"""``attention_needs`` of a family with ALiBi."""


class AlibiFamilyPlugin(FamilyPlugin):
    """Base class of a family with ALiBi in place of positions. Source: arXiv:2108.12409."""

    @hookimpl
    def ascend_position_bias(
        self, config: RunConfig, device: Device, groups: ProcessGroupCollection
    ) -> PositionBias:
        from ascend_run.ops.attention.alibi import alibi

        return alibi(config.model.num_attention_heads, groups.tp, device.torch_device)
