"""Steps of sharded matrices in float64, against those of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import RunConfig
from ascend_run.plugins.optimizers.muon import MuonConfig
from ascend_run.plugins.optimizers.muon.optimizer import MuonWithAdamW, TensorParallelRanks
from ascend_run.plugins.optimizers.muon.parameters import fused_rows, parameter_options
from ascend_run.testing.pool import GlooPool
from tests.support.tiny_configs import model_fields, parallel_fields

MODEL: Final = {"num_attention_heads": 4, "num_query_groups": 2, "gated_linear_unit": True}
SHAPES: Final[Mapping[str, tuple[tuple[int, ...], int | None]]] = {
    "self_attention.linear_qkv.weight": ((2 * (2 + 1 + 1) * 3, 5), 0),
    "self_attention.linear_proj.weight": ((5, 12), 1),
    "mlp.linear_fc1.weight": ((16, 5), 0),
    "mlp.linear_fc2.weight": ((5, 8), 1),
    "mlp.router.weight": ((3, 5), None),
    "mlp.experts.fc1": ((3, 8, 5), 1),
    "mlp.experts.fc2": ((3, 5, 4), 2),
}
"""Parameter -> its shape, and the dimension that ranks share."""
GATED: Final = ("linear_fc1.weight", "experts.fc1")
STEPS: Final = 4


def draw(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + [*SHAPES].index(name))
    return torch.randn(SHAPES[name][0], dtype=torch.float64, generator=generator)


def shard(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's rows or columns: of a gate and of up, its rows of each."""
    dim = SHAPES[name][1]
    if dim is None:
        return whole
    halves = whole.chunk(2, dim) if name.endswith(GATED) else (whole,)
    return torch.cat([half.chunk(size, dim)[rank] for half in halves], dim)


def stepped(rank: int, size: int, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the shards of a rank after some steps; with a size of 1, whole parameters."""
    fused = fused_rows(RunConfig(model=model_fields(MODEL), parallel=parallel_fields()).model)
    parameters: dict[str, nn.Parameter] = {}
    for name, (_, dim) in SHAPES.items():
        parameters[name] = nn.Parameter(shard(name, draw(name, 0), rank, size))
        if dim is not None and size > 1:
            mark(parameters[name], tensor_model_parallel=True, partition_dim=dim)
    groups = [
        {"params": [p], **parameter_options(name, True, by_adamw=(), fused=fused)}
        for name, p in parameters.items()
    ]
    world = dist.group.WORLD
    optimizer = MuonWithAdamW(
        groups,
        options=MuonConfig(**options),
        lr=0.03,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.4,
        ranks=TensorParallelRanks(world, world) if world is not None and size > 1 else None,
    )
    for step in range(1, STEPS + 1):
        for name, p in parameters.items():
            p.grad = shard(name, draw(name, step), rank, size)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def stepped_here(options: Mapping[str, Any]) -> dict[str, Tensor]:
    return stepped(dist.get_rank(), dist.get_world_size(), options)


@pytest.mark.parametrize("scale_mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"tp{size}")
def test_shards_move_as_the_whole_matrix(gloo_pool: GlooPool, size: int, scale_mode: str) -> None:
    """Also where two groups of queries are shared by four ranks."""
    options = {"ns_dtype": "float32", "scale_mode": scale_mode}
    want = stepped(0, 1, options)
    for rank, got in enumerate(gloo_pool.run(stepped_here, size, options)):
        for name, found in got.items():
            expected = shard(name, want[name], rank, size)
            assert found.dtype == torch.float64
            assert (found - expected).abs().max() <= 1e-12 * expected.abs().max(), name
