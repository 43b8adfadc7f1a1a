"""QLoRA: the frozen base of an adapter in 4 bits a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    LegacyFlag,
    LinkPlace,
    Manifest,
    Maturity,
    Numerics,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig, RunContext
    from ascend_run.plugin_api import contracts as c

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = ("float32", "bfloat16", "float16")


@attrs.frozen(kw_only=True)
class QloraOptions:
    """Options, set by ``plugins.qlora.<field>=<value>``; names and values of bitsandbytes."""

    blocksize: int = attrs.field(default=64, validator=attrs.validators.in_(_BLOCKS))
    """Neighbouring weights that share a scale."""
    use_double_quant: bool = True
    """Quantise the scales too: 8 bits each, with a scale for each 256 of them."""
    compute_dtype: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.in_(_DTYPES))
    )
    """Dtype of the matmuls with quantised weights: ``float32``, ``bfloat16`` or ``float16``;
    default: that of the run (``train.precision``)."""


class Qlora:
    """Store the frozen weights of all linears in layers in NF4, and train an adapter beside them.

    Memory: 0.516 bytes a weight, in place of 2 in bf16. Cost: each forward and each backward
    dequantises the weight. Numerics: equal in every bit to the adapter's run whose linears have the
    dequantised weights. Source: Dettmers et al. 2023, arXiv:2305.14314.
    """

    manifest = Manifest(
        name="qlora",
        summary="keep the frozen base of an adapter in 4 bits a weight (NF4)",
        requires=("lora",),
        # Blocks that no tensor-parallel size of a small model cuts, as ranks quantise their shards.
        small_model_settings={
            "blocksize": 32,
            "use_double_quant": False,
            "model.hidden_size": 64,
            "model.ffn_hidden_size": 64,
        },
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=2,
        forward_links={"linear": LinkPlace.OWN},
        maturity=Maturity.BETA,
        legacy_flags=(LegacyFlag(flag="--qlora"), LegacyFlag(flag="--qlora-nf4")),
        source="arXiv:2305.14314",
    )
    config_class = QloraOptions

    def __init__(self, config: QloraOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        adapters, problems = config.plugins["lora"], []
        if adapters.checkpoint == "full":
            problems.append(
                "qlora: plugins.lora.checkpoint=full would save the base, of which the run holds "
                "only 4 bits a weight; use plugins.lora.checkpoint=adapters: a run that resumes "
                "quantises the weights of model.hf_path again"
            )
        if adapters.dora:
            problems.append(
                "qlora: plugins.lora.dora=true takes norms of the rows of weights, of which the "
                "run holds only 4 bits a weight; set it to false, or leave qlora out"
            )
        return problems

    @hookimpl
    def ascend_cost(self, rank: c.PipelineStage) -> c.CostChange:
        from .cost import quantised_cost

        return quantised_cost(rank, self.config)

    @hookimpl
    def ascend_weight_storage(self, device: c.Device) -> c.WeightStorage:
        from .storage import Nf4Storage

        return Nf4Storage(
            self.config.blocksize,
            device.torch_device,
            use_double_quant=self.config.use_double_quant,
        )

    @hookimpl
    def ascend_checkpoint_entries(self, context: RunContext) -> Mapping[str, c.CheckpointEntry]:
        from .record import QuantisationRecord

        return {"qlora": QuantisationRecord(context, self.config)}

    @hookimpl
    def ascend_linear(self, name: str) -> c.ModuleWrapper | None:
        if self.config.compute_dtype is None or name == "eh_proj":  # which is not in a layer
            return None
        import torch

        from ascend_run.ops.linear.parallel_linear import linear_link

        dtype = getattr(torch, self.config.compute_dtype)
        return lambda linear: linear_link(linear, compute_dtype=dtype)
