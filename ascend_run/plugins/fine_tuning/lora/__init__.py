"""LoRA: low-rank adapters beside frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    ANY,
    Claim,
    ConfigError,
    ForwardLink,
    FrozenMapping,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Maturity,
    Numerics,
    RunPhase,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.plugin_api import Layout, RunConfig, RunContext
    from ascend_run.plugin_api import contracts as c

    from .base import BaseRecord

ROLE = "policy"
"""The model that is adapted; a reference model beside it stays unchanged."""


@attrs.frozen(kw_only=True)
class LoraOptions:
    """Options, set by ``plugins.lora.<field>=<value>``."""

    rank: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """Rank of every adapter."""
    alpha: float = attrs.field(default=16.0, validator=attrs.validators.gt(0))
    """The output of an adapter is multiplied by ``alpha / rank``."""
    rank_pattern: Mapping[str, int] = attrs.field(factory=dict, converter=FrozenMapping)
    """Linear or part of one, as in ``target_modules`` -> its rank in place of ``rank``, as in
    ``{linear_qkv = 16}``; a part's own value wins."""
    alpha_pattern: Mapping[str, float] = attrs.field(factory=dict, converter=FrozenMapping)
    """Linear or part of one -> its alpha in place of ``alpha``."""
    dora: bool = False
    """Decompose the weights into magnitudes, which are trained too, and directions,
    arXiv:2402.09353."""
    rslora: bool = False
    """Multiply by ``alpha / sqrt(rank)`` instead, arXiv:2312.03732."""
    dropout: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Dropout probability of an adapter's input in training."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linears to adapt: ``linear_qkv``, ``linear_proj``, ``linear_fc1``, ``linear_fc2``, or one
    projection of a fused linear: ``linear_q``, ``linear_k``, ``linear_v``, ``linear_fc1_gate``,
    ``linear_fc1_up``. Of shared experts alone: ``shared_experts``, ``shared_experts_fc1`` ...
    Weights of routed experts, which ``all-linear`` leaves out: ``experts``, or ``experts_fc1`` or
    ``experts_fc2`` alone."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full, and to save with the adapters: ``word_embeddings``,
    ``output_layer``, ``final_layernorm``, ``input_layernorm``, ``pre_mlp_layernorm``,
    ``router`` ... A score head is always among them."""
    load: str | None = None
    """Folder of an adapter in PEFT format to start from. A task's base that is its reference has
    this adapter, too, and keeps it as it was loaded."""
    export: bool | None = None
    """Write the adapter in PEFT format to ``<run.output_dir>/adapter``, with every checkpoint and
    after the last step; default: if PEFT's names for the model's family are known."""
    checkpoint: str = attrs.field(
        default="adapters", validator=attrs.validators.in_(("adapters", "full"))
    )
    """What checkpoints contain: the adapters alone, or the frozen weights too."""


class Lora:
    """Compute ``y = W x + scale * B A x`` with A and B trained and W frozen.

    Cost: for each collective of a Megatron linear, one of ``rank`` numbers per token instead of its
    full width. Numerics: at the first step B is zero, so the model equals the base. Source: Hu et
    al. 2021, arXiv:2106.09685.
    """

    manifest = Manifest(
        name="lora",
        summary="train low-rank adapters on frozen weights, in PEFT's file format",
        claims=(Claim.ADAPTER,),
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        forward_links={
            "linear": LinkPlace.AROUND,
            "embedding": LinkPlace.AROUND,
            "experts": LinkPlace.OWN,
        },
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--lora-r", values={ANY: True}),
            LegacyFlag(flag="--lora-r", key="plugins.lora.rank", values=None),
            LegacyFlag(flag="--lora-alpha", key="plugins.lora.alpha", values=None),
            LegacyFlag(
                flag="--lora-target-modules", key="plugins.lora.target_modules", values=None
            ),
            LegacyFlag(
                flag="--lora-modules-to-save", key="plugins.lora.modules_to_save", values=None
            ),
            LegacyFlag(flag="--lora-load", key="plugins.lora.load", values=None),
            LegacyFlag(flag="--lora-register-forward-hook", key="", values={}),
        ),
        source="arXiv:2106.09685",
    )
    config_class = LoraOptions

    def __init__(self, config: LoraOptions) -> None:
        self.config = config
        self._exported_step: int | None = None
        self._record: BaseRecord | None = None

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        from .rules import problems

        return problems(config, self.config)

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: c.PipelineStage) -> c.CostChange:
        from .cost import adapter_cost

        return adapter_cost(config, layout, rank, self.config)

    @hookimpl
    def ascend_linear(
        self, config: RunConfig, device: c.Device, role: str, name: str, layer_index: int
    ) -> c.ModuleWrapper | None:
        from .targets import wanted_parts

        parts = wanted_parts(self.config.target_modules, name, config) if role == ROLE else ()
        # Layers of multi-token prediction come after the model's: frozen, and not in PEFT's files.
        if not parts or layer_index >= config.model.num_layers:
            return None
        from .adapter import attach

        where = device.torch_device
        return lambda linear: attach(linear, layer_index, name, parts, self.config, where)

    @hookimpl
    def ascend_moe_layer(
        self, config: RunConfig, device: c.Device, role: str, layer_index: int
    ) -> c.ModuleWrapper | None:
        from .targets import wanted_experts

        parts = wanted_experts(self.config.target_modules) if role == ROLE else ()
        if not parts or layer_index >= config.model.num_layers:
            return None
        from .expert_adapter import attach_to_experts

        where = device.torch_device

        def wrap(module: nn.Module) -> Mapping[str, ForwardLink]:
            link = attach_to_experts(module.experts, layer_index, parts, self.config, where)
            return {"experts": link}

        return wrap

    @hookimpl
    def ascend_embedding(self, role: str) -> c.ModuleWrapper | None:
        if role != ROLE:
            return None
        from .freezing import begin_graph

        return begin_graph

    @hookimpl
    def ascend_model(self, config: RunConfig, role: str) -> c.Wrapper[nn.Module] | None:
        if role != ROLE:
            return None

        def wrap(model: nn.Module) -> nn.Module:
            from .as_reference import copy_loaded
            from .expert_adapter import every_adapter, number_layers
            from .freezing import freeze
            from .magnitudes import initialize
            from .peft_folder import load_adapters
            from .saved_modules import saved_modules
            from .stored_parts import keep_loaded

            freeze(model, saved_modules(config, self.config))
            number_layers(model)
            for adapter in every_adapter(model):
                adapter.initialize(config.run.seed)
            if self.config.dora:
                initialize(model)
            if self.config.load is not None:
                load_adapters(self.config.load, model, config, self.config)
                keep_loaded(model, config, self.config)
                copy_loaded(model)
            return model

        return wrap

    @hookimpl
    def ascend_phase(
        self, context: RunContext, phase: RunPhase
    ) -> Callable[[], AbstractContextManager[None]] | None:
        if phase is not RunPhase.REFERENCE:
            return None
        is_base = not any(bundle.frozen for bundle in context.models.values())
        if self.config.modules_to_save and is_base:  # of another task than dpo, which checks it
            raise ConfigError(
                f"plugins.lora.modules_to_save={','.join(self.config.modules_to_save)}: the base "
                "cannot be the reference, since these modules are trained in place; expected no "
                "such modules, or a reference with weights of its own (plugins.dpo.reference=...)"
            )
        from .as_reference import as_loaded, switched_off
        from .expert_adapter import every_adapter

        if self._record is not None and is_base:
            self._record.require_same_load()
        without = switched_off if self.config.load is None else as_loaded
        chunks = context.models[ROLE].chunks
        return lambda: without([one for chunk in chunks for one in every_adapter(chunk)])

    @hookimpl
    def ascend_checkpoint_filter(
        self, config: RunConfig, role: str
    ) -> c.Wrapper[Sequence[c.TensorShard]] | None:
        if role != ROLE or self.config.checkpoint == "full":
            return None
        from ascend_run.ops.linear.peft_settings import is_saved

        from .saved_modules import saved_modules

        modules = saved_modules(config, self.config)

        def is_trained(shard: c.TensorShard) -> bool:
            return ".adapter." in shard.key or is_saved(shard.key.partition("/")[2], modules)

        return lambda shards: [shard for shard in shards if is_trained(shard)]

    @hookimpl
    def ascend_checkpoint_entries(self, context: RunContext) -> Mapping[str, c.CheckpointEntry]:
        from .base import BaseRecord

        self._record = BaseRecord(context.config, self.config)
        return {"lora": self._record}

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        from .freezing import begin_magnitudes, log_trained_parameters

        if self.config.dora and self.config.load is None and context.step == 0:
            begin_magnitudes(context, ROLE)
        log_trained_parameters(context, ROLE)

    @hookimpl
    def ascend_after_step(self, context: RunContext) -> None:
        if context.step == context.config.train.train_iters:
            self._export(context)

    @hookimpl
    def ascend_after_checkpoint(self, context: RunContext) -> None:
        self._export(context)

    def _export(self, context: RunContext) -> None:
        from .rules import exports

        if not exports(context.config, self.config) or self._exported_step == context.step:
            return
        from .peft_folder import export_adapters

        base = None if self._record is None else self._record.base
        export_adapters(context, ROLE, self.config, base)
        self._exported_step = context.step
