"""Experts over tensor-parallel ranks: each owns full experts of its own instead of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ascend_run.plugin_api import (
    Condition,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    hookimpl,
)

_EP, _EXPERT_TP = "expert_model_parallel_size", "expert_tensor_parallel_size"


@attrs.frozen(kw_only=True)
class MoeTpExtendEpConfig:
    """Options, set by ``plugins.moe-tp-extend-ep.<field>=<value>``."""

    expert_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Tensor-parallel groups over whose ranks the experts are distributed together. Unit:
    groups."""


class MoeTpExtendEp:
    """Distribute experts over the ranks of tensor-parallel groups, without sharding any expert.

    Tokens are exchanged by one all-to-all over all of these ranks; each rank routes its own. Cost:
    no all-gather and reduce-scatter of tokens over the ranks that would share an expert. Numerics:
    gradients of an expert are summed in a different order. Source: MindSpeed's
    ``moe_tp_extend_ep``; Megatron's expert parallelism with an expert tensor-parallel size of 1.
    """

    manifest = Manifest(
        name="moe-tp-extend-ep",
        summary="distribute full experts over tensor-parallel ranks too",
        idle=Condition.one_rank(_EP, why="all experts are on every rank"),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.EMULATED, "npu": Support.UNVERIFIED},
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--moe-tp-extend-ep"),
            LegacyFlag(
                flag="--expert-model-parallel-size",
                key="plugins.moe-tp-extend-ep.expert_parallel_size",
                values=None,
                where={"--moe-tp-extend-ep": ""},
            ),
        ),
        source="MindSpeed, moe-tp-extend-ep",
    )
    config_class = MoeTpExtendEpConfig

    def __init__(self, config: MoeTpExtendEpConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_defaults(self, config: RunConfig) -> Mapping[str, object]:
        return {f"parallel.{name}": size for name, size in self._sizes(config).items()}

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        tp, own = config.parallel.tensor_model_parallel_size, self.config.expert_parallel_size
        return [
            f"moe-tp-extend-ep distributes full experts over {own} times "
            f"parallel.tensor_model_parallel_size={tp} ranks, so parallel.{name} is {size}, not "
            f"{config.parallel[name]}; leave it out, or set "
            "plugins.moe-tp-extend-ep.expert_parallel_size"
            for name, size in self._sizes(config).items()
            if config.parallel[name] != size
        ]

    def _sizes(self, config: RunConfig) -> dict[str, int]:
        """Return the sizes of the experts' grid; empty without experts."""
        if config.model.num_moe_experts is None:
            return {}
        ranks = config.parallel.tensor_model_parallel_size * self.config.expert_parallel_size
        return {_EP: ranks, _EXPERT_TP: 1}
