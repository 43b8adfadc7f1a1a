"""Muon: momentum that is orthogonalized, for matrices; AdamW for all other parameters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ascend_run.plugin_api import (
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    OptimizerSpec,
    OptimizerState,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugins.optimizers import warn_of_unknown_names

from .cost import muon_cost
from .parameters import ADAMW, ALGORITHM, MUON, fused_rows, parameter_options

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ascend_run.plugin_api import RunContext

_FRACTION = [attrs.validators.ge(0.0), attrs.validators.lt(1.0)]


@attrs.frozen(kw_only=True)
class MuonConfig:
    """Options, set by ``plugins.muon.<field>=<value>``."""

    momentum: float = attrs.field(default=0.95, validator=_FRACTION)
    """Share of the momentum that each step keeps."""
    nesterov: bool = True
    """Orthogonalize Nesterov's look-ahead of the momentum instead of the momentum itself."""
    num_ns_steps: int = attrs.field(
        default=5, validator=[attrs.validators.ge(1), attrs.validators.lt(100)]
    )
    """Newton-Schulz iterations in each step."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the Newton-Schulz iterations; float32: that of the master weights."""
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Scale of an update with A rows and B columns: ``sqrt(max(A, B))``, ``sqrt(A / B)`` or
    ``sqrt(max(1, A / B))``."""
    extra_scale_factor: float = attrs.field(default=0.2, validator=attrs.validators.gt(0.0))
    """Factor of that scale. With 0.2 and ``spectral`` updates are about as large as AdamW's, so
    that one learning rate suits both."""
    lr_multiplier: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    """Learning rate of the matrices, divided by that of other parameters."""
    split_fused: bool = True
    """Orthogonalize queries, keys and values of a fused projection separately, and gate and up."""
    adamw: tuple[str, ...] = ()
    """Names of further matrices to update by AdamW, or of modules that hold them, such as
    ``router``, ``experts`` or ``linear_proj``."""


class Muon:
    """Step along the orthogonalized momentum of each matrix; all else by AdamW.

    Cost: one state in place of AdamW's two for matrices, and the Newton-Schulz iterations in each
    step. Numerics: another optimizer. Source: Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, for the scale.
    """

    manifest = Manifest(
        name="muon",
        summary="Muon for matrices, with AdamW for all other parameters",
        numerics=Numerics.MODEL,
        small_model_settings={"ns_dtype": "float32"},
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=3,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--optimizer", values={"muon": True}),
            LegacyFlag(flag="--muon-momentum", key="plugins.muon.momentum", values=None),
            LegacyFlag(
                flag="--muon-use-nesterov",
                key="plugins.muon.nesterov",
                values={"": True, None: False},
            ),
            LegacyFlag(flag="--muon-num-ns-steps", key="plugins.muon.num_ns_steps", values=None),
            LegacyFlag(flag="--muon-scale-mode", key="plugins.muon.scale_mode", values=None),
            LegacyFlag(
                flag="--muon-extra-scale-factor",
                key="plugins.muon.extra_scale_factor",
                values={None: 1.0},
            ),
            LegacyFlag(
                flag="--muon-extra-scale-factor",
                key="plugins.muon.extra_scale_factor",
                values=None,
            ),
            LegacyFlag(
                flag="--muon-no-split-qkv", key="plugins.muon.split_fused", values={"": False}
            ),
        ),
        source="megatron-core, optimizer/muon.py; MindSpeed LLM, its optimizer muon",
    )
    config_class = MuonConfig

    def __init__(self, config: MuonConfig) -> None:
        self.config = config
        self._groups: ProcessGroupCollection | None = None

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
        return muon_cost(config, layout, rank, self.config)

    @hookimpl
    def ascend_fused_operators(self, groups: ProcessGroupCollection) -> None:
        """Note over which ranks matrices are sharded, before there is an optimizer."""
        self._groups = groups

    @hookimpl
    def ascend_optimizer(self, config: RunConfig) -> OptimizerSpec:
        options = config.optimizer
        by_adamw = {ALGORITHM: ADAMW}
        return OptimizerSpec(
            build=partial(
                self._build,
                lr=options.lr,
                betas=(options.adam_beta1, options.adam_beta2),
                eps=options.adam_eps,
                weight_decay=options.weight_decay,
            ),
            states={
                "momentum_buffer": OptimizerState(where={ALGORITHM: MUON}),
                "step": OptimizerState(scalar=True, where=by_adamw),
                "exp_avg": OptimizerState(where=by_adamw),
                "exp_avg_sq": OptimizerState(where=by_adamw),
            },
            element_wise=False,
            tensor_parallel=True,
            parameter_options=partial(
                parameter_options,
                by_adamw=self.config.adamw,
                fused=fused_rows(config.model) if self.config.split_fused else {},
            ),
        )

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        warn_of_unknown_names("plugins.muon.adamw", self.config.adamw, context)

    def _build(self, param_groups: list[dict[str, Any]], **of_adamw: Any) -> torch.optim.Optimizer:
        from .optimizer import MuonWithAdamW, TensorParallelRanks

        groups = self._groups
        ranks = None if groups is None else TensorParallelRanks(groups.tp, groups.expt_tp)
        return MuonWithAdamW(param_groups, options=self.config, ranks=ranks, **of_adamw)
