"""Shared experts: an MLP that every token goes through, beside its routed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ascend_run.ops.experts.dispatcher_cost import NO_EXPERTS
from ascend_run.plugin_api import (
    ANY,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugin_api.error_text import show

_WIDTH = "moe_shared_expert_intermediate_size"


@attrs.frozen(kw_only=True)
class SharedExpertsConfig:
    """Options, set by ``plugins.shared-experts.<field>=<value>``."""

    count: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Shared experts of a layer, each as wide as a routed one."""
    gate: bool = False
    """Multiply their output by the sigmoid of a linear of the token."""
    overlap: bool = False
    """Compute them behind the collectives of the token dispatcher."""


class SharedExperts:
    """Give every layer with experts some that every token goes through.

    They are one MLP of their widths together, sharded over tensor-parallel ranks: Megatron's. Cost:
    that of the MLP. Numerics: the model gets more parameters; with the same fields of the model,
    set one by one, results are bitwise equal. Source: DeepSeekMoE, arXiv:2401.06066.
    """

    manifest = Manifest(
        name="shared-experts",
        summary="experts that every token goes through, beside its routed ones",
        idle=NO_EXPERTS,
        numerics=Numerics.MODEL,
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--n-shared-experts", values={ANY: True}),
            LegacyFlag(flag="--n-shared-experts", key="plugins.shared-experts.count", values=None),
        ),
        source="arXiv:2401.06066",
    )
    config_class = SharedExpertsConfig

    def __init__(self, config: SharedExpertsConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_defaults(self, config: RunConfig) -> Mapping[str, object]:
        return {f"model.{name}": value for name, (value, _) in self._fields(config).items()}

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return [
            f"model.{name}={show(config.model[name])}, but {option} makes it {show(value)}; "
            "leave one of them out"
            for name, (value, option) in self._fields(config).items()
            if config.model[name] != value
        ]

    def _fields(self, config: RunConfig) -> dict[str, tuple[object, str]]:
        """Return field of the model -> its value, and the option that it follows from."""
        model, count = config.model, self.config.count
        if model.num_moe_experts is None:
            return {}
        width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
        option = f"plugins.shared-experts.count={count} of width {width}"
        fields: dict[str, tuple[object, str]] = {_WIDTH: (count * width, option)}
        for name, is_on in (("gate", self.config.gate), ("overlap", self.config.overlap)):
            if is_on:
                option = f"plugins.shared-experts.{name}=true"
                fields[f"moe_shared_expert_{name}"] = (True, option)
        return fields
