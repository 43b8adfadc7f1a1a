"""One run that ``memory_prediction`` measures: its model, layout and features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

EXAMPLES: Final = Path(__file__).parent.parent / "examples"

_DENSE: Final[Mapping[str, Any]] = {
    "model.family": "llama",
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 176,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 4,
    "model.vocab_size": 512,
    "model.make_vocab_size_divisible_by": 64,
    "data.seq_length": 128,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 4,
    "train.precision": "bf16",
    "train.train_iters": 5,
    "optimizer.lr": 1e-3,
    "run.seed": 17,
}
_MOE: Final[Mapping[str, Any]] = {
    **_DENSE,
    "model.family": "mixtral",
    "model.ffn_hidden_size": 128,
    "model.moe_ffn_hidden_size": 128,
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_aux_loss_coeff": 0.01,
}
_UNTIMED: Final = {
    "plugins.cpu.bf16_matmul_dtype": "bf16",
    "plugins.cpu.bf16_attention_dtype": "bf16",
    "plugins.cpu.fp32_matmul_library": "torch",
}
"""By default each processor times them, and copies of operands would be in some results."""
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {"dense": _DENSE, "moe": _MOE}
"""The shapes of examples/dense.toml and examples/demo.toml, made smaller by the same factor."""


@attrs.frozen(kw_only=True)
class Case:
    """One run on one to four ranks."""

    name: str
    model: str = "dense"
    """One of ``MODELS``, or the example whose values these are."""
    ranks: int = 1
    plugins: tuple[str, ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)
    memory_gb: float | None = None
    """Speed of the memory by which the run's clock goes, see ``operator_clock``; None: the clock is
    the machine's. Unit: GB/s."""
    reads_pairs: bool = False
    """Whether its samples are those of ``memory_pairs``; others are made without files."""

    @property
    def config(self) -> dict[str, Any]:
        return {**_UNTIMED, **MODELS.get(self.model, {}), **self.values}


TP: Final = {"parallel.tensor_model_parallel_size": 2}
SP: Final = {**TP, "parallel.sequence_parallel": True}
PP: Final = {"parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 16}
CP: Final = {"parallel.context_parallel_size": 2}
EP: Final = {"parallel.expert_model_parallel_size": 2}
VPP: Final = {**PP, "parallel.virtual_pipeline_model_parallel_size": 2}
BATCH: Final = {"train.global_batch_size": 16}
SPREAD: Final = {"ddp.use_distributed_optimizer": True}
SWAP: Final = {"plugins.swap-attention.min_bytes": 1024}
