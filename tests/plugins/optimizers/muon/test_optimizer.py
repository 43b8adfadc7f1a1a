"""Steps of the optimizer in float64, against the formula and against torch's Muon and AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.optimizer_states import create_states, state_problems
from ascend_run.plugin_api import OptimizerSpec, RunConfig
from ascend_run.plugins.optimizers.muon import Muon, MuonConfig
from ascend_run.plugins.optimizers.muon.newton_schulz import orthogonalized
from tests.support.tiny_configs import model_fields, parallel_fields

MODEL: Final = {"num_attention_heads": 4, "num_query_groups": 2, "gated_linear_unit": True}
WIDTH: Final = 3
"""Rows of a head."""
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "embedding.word_embeddings.weight": (12, 5),
    "decoder.layers.0.input_layernorm.weight": (5,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (2 * (2 + 1 + 1) * WIDTH, 5),
    "decoder.layers.0.self_attention.linear_proj.weight": (5, 12),
    "decoder.layers.0.mlp.linear_fc1.weight": (14, 5),
    "decoder.layers.0.mlp.linear_fc2.weight": (5, 7),
    "decoder.layers.1.mlp.router.weight": (3, 5),
    "decoder.layers.1.mlp.experts.fc1": (3, 8, 5),
    "decoder.layers.1.mlp.experts.fc2": (3, 5, 4),
    "decoder.layers.1.mlp.experts.fc1_bias": (3, 8),
    "output_layer.weight": (12, 5),
}
ORTHOGONALIZED: Final = (
    *("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight"),
    *("router.weight", "fc1", "fc2"),
)
STEPS: Final = 4
RATES: Final = {"lr": 0.03, "weight_decay": 0.4}
ADAM: Final[dict[str, Any]] = {"betas": (0.9, 0.95), "eps": 1e-8}


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(draw(shape, at, dtype))
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def set_gradients(of: Mapping[str, Tensor], step: int) -> None:
    for at, p in enumerate(of.values()):
        p.grad = draw(tuple(p.shape), 100 * step + at, p.dtype)


def spec(**options: Any) -> OptimizerSpec:
    config = RunConfig(model=model_fields(MODEL), parallel=parallel_fields())
    found: OptimizerSpec = Muon(MuonConfig(**options)).ascend_optimizer(config=config)
    return found


def is_matrix(name: str) -> bool:
    return len(SHAPES[name]) > 1 and not name.endswith("_bias")


def optimizer(of: Mapping[str, Tensor], **options: Any) -> torch.optim.Optimizer:
    found = spec(**options)
    groups = [
        {"params": [p], **RATES, **found.parameter_options(name, is_matrix(name))}
        for name, p in of.items()
    ]
    return found.build(groups)


def formula(matrix: Tensor, steps: int = 5) -> Tensor:
    """``X <- a X + b (X X^T) X + c (X X^T)^2 X``, from ``M / |M|``."""
    x = matrix / math.sqrt(float((matrix * matrix).sum()))
    for _ in range(steps):
        gram = torch.einsum("ij,kj->ik", x, x)
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def rows_of_matrices(name: str, num_rows: int) -> list[list[int]]:
    """The rows of each matrix in a parameter: two groups of two queries, a key and a value; a gate
    and up."""
    rows = [*range(num_rows)]
    if name.endswith("linear_qkv.weight"):
        kinds = [row // WIDTH % 4 for row in rows]
        return [[row for row in rows if kinds[row] in kind] for kind in ((0, 1), (2,), (3,))]
    if name.endswith(("linear_fc1.weight", "experts.fc1")):
        return [rows[: num_rows // 2], rows[num_rows // 2 :]]
    return [rows]


SCALES: Final = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: max(1.0, math.sqrt(rows / columns)),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"scale_mode": "unit_rms_norm", "extra_scale_factor": 1.5},
        {"scale_mode": "shape_scaling", "lr_multiplier": 3.0, "num_ns_steps": 2},
        {"split_fused": False, "adamw": ("router", "linear_proj")},
    ],
    ids=str,
)
def test_each_step_is_that_of_the_formula(options: dict[str, Any]) -> None:
    """Every matrix by the iterations as they are published, all else by AdamW."""
    ours = parameters()
    stepping = optimizer(ours, ns_dtype="float32", **options)
    chosen = MuonConfig(**options)
    weights = {name: p.detach().clone() for name, p in ours.items()}
    first = {name: torch.zeros_like(p) for name, p in weights.items()}
    second = {name: torch.zeros_like(p) for name, p in weights.items()}
    for t in range(1, STEPS + 1):
        set_gradients(ours, t)
        stepping.step()
        for name, p in weights.items():
            grad, m, v = ours[name].grad, first[name], second[name]
            by_muon = name.endswith(ORTHOGONALIZED) and not any(n in name for n in chosen.adamw)
            if not by_muon:
                m.copy_(0.9 * m + 0.1 * grad)
                v.copy_(0.95 * v + 0.05 * grad * grad)
                size = (v / (1 - 0.95**t)).sqrt() + 1e-8
                p -= RATES["lr"] * (m / (1 - 0.9**t) / size + RATES["weight_decay"] * p)
                continue
            m.copy_(chosen.momentum * m + (1 - chosen.momentum) * grad)
            ahead = chosen.momentum * m + (1 - chosen.momentum) * grad
            moving = ahead if chosen.nesterov else m
            lr = RATES["lr"] * chosen.lr_multiplier
            p *= 1 - lr * RATES["weight_decay"]
            cut = (
                rows_of_matrices(name, p.shape[-2])
                if chosen.split_fused
                else [[*range(p.shape[-2])]]
            )
            stacked = (x.view(-1, *p.shape[-2:]) for x in (p, moving))
            for matrix, momentum in zip(*stacked, strict=True):
                for rows in cut:
                    scale = SCALES[chosen.scale_mode](len(rows), p.shape[-1])
                    update = formula(momentum[rows], chosen.num_ns_steps)
                    matrix[rows] -= lr * chosen.extra_scale_factor * scale * update
    for name, p in weights.items():
        torch.testing.assert_close(ours[name].detach(), p, rtol=1e-10, atol=1e-10, msg=name)
        buffer = stepping.state[ours[name]].get("momentum_buffer")
        assert (buffer is None) == ("exp_avg" in stepping.state[ours[name]])
        if buffer is not None:
            torch.testing.assert_close(buffer, first[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("adjusted", "options"),
    [
        ("match_rms_adamw", {}),
        ("original", {"scale_mode": "shape_scaling", "extra_scale_factor": 1.0}),
    ],
)
def test_matrices_have_the_bits_of_torch(
    nesterov: bool, adjusted: str, options: dict[str, Any]
) -> None:
    """Where a parameter is one matrix, with the iterations in bfloat16; all else those of AdamW."""
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    stepping = optimizer(ours, nesterov=nesterov, split_fused=False, **options)
    names = [n for n in SHAPES if n.endswith(ORTHOGONALIZED) and len(SHAPES[n]) == 2]
    others = [n for n in SHAPES if not n.endswith(ORTHOGONALIZED)]
    muon = torch.optim.Muon(
        [theirs[n] for n in names],
        **RATES,
        momentum=0.95,
        nesterov=nesterov,
        adjust_lr_fn=adjusted,
    )
    adamw = torch.optim.AdamW([theirs[n] for n in others], **RATES, **ADAM, fused=True)
    for t in range(1, STEPS + 1):
        for side in (ours, theirs):
            set_gradients(side, t)
        for one in (stepping, muon, adamw):
            one.step()
    assert len(names) == 5
    for name in (*names, *others):
        assert torch.equal(ours[name], theirs[name]), name
        of_torch = (muon if name in names else adamw).state[theirs[name]]
        for key, state in of_torch.items():
            assert torch.equal(stepping.state[ours[name]][key], state), (name, key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stacked_experts_are_matrices_of_their_own(dtype: str) -> None:
    """Within rounding of the iterations' dtype, as batched matmuls may add in another order."""
    ours, alone = parameters(torch.float32), parameters(torch.float32)
    stepping = optimizer(ours, ns_dtype=dtype)
    name = "decoder.layers.1.mlp.experts.fc2"
    experts = {f"mlp.linear_fc2.{at}": nn.Parameter(m) for at, m in enumerate(alone[name].detach())}
    found = spec(ns_dtype=dtype)
    options = found.parameter_options("mlp.linear_fc2.weight", True)
    separate = found.build([{"params": [*experts.values()], **RATES, **options}])
    for t in range(1, STEPS + 1):
        set_gradients(ours, t)
        for at, p in enumerate(experts.values()):
            p.grad = ours[name].grad[at].clone()
        stepping.step()
        separate.step()
    stacked = torch.stack([p.detach() for p in experts.values()])
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    torch.testing.assert_close(ours[name].detach(), stacked, rtol=0, atol=tolerance * RATES["lr"])


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 7, 3), (2, 2, 5, 5)], ids=str)
def test_singular_values_follow_the_polynomial_and_vectors_stay(shape: tuple[int, ...]) -> None:
    """Values that are not tiny come into [0.68, 1.2]."""
    matrix = draw(shape, 3, torch.float64)
    before = matrix.clone()
    found = orthogonalized(matrix, 5)
    assert torch.equal(matrix, before)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum(dim=-1, keepdim=True).sqrt()
    are_large = values > 0.02
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(found, left * values[..., None, :] @ right, rtol=0, atol=1e-10)
    assert are_large.any()
    assert 0.68 < float(values[are_large].min()) < float(values[are_large].max()) < 1.2


def test_a_matrix_of_zeros_has_no_direction() -> None:
    """As the momentum of an expert without tokens."""
    for dtype in (torch.bfloat16, torch.float32):
        found = orthogonalized(torch.zeros(2, 3, 4, dtype=dtype), 5)
        assert found.dtype is dtype
        assert torch.equal(found, torch.zeros(2, 3, 4, dtype=dtype))


def test_states_are_as_declared_before_and_after_the_first_step() -> None:
    ours, declared = parameters(torch.float32), spec().states
    stepping = optimizer(ours)
    assert create_states(stepping, declared) == []
    assert state_problems(stepping, declared) == []
    for name, p in ours.items():
        found = (
            {"momentum_buffer"}
            if name.endswith(ORTHOGONALIZED)
            else {"step", "exp_avg", "exp_avg_sq"}
        )
        assert stepping.state[p].keys() == found
    fresh = parameters(torch.float32)
    first = optimizer(fresh)
    set_gradients(fresh, 1)
    first.step()
    assert state_problems(first, declared) == []


def test_a_parameter_without_gradient_has_no_step() -> None:
    ours = parameters()
    stepping = optimizer(ours)
    set_gradients(ours, 1)
    left_out = ("decoder.layers.0.mlp.linear_fc2.weight", "output_layer.weight")
    before = {name: ours[name].detach().clone() for name in left_out}
    for name in left_out:
        ours[name].grad = None
    stepping.step()
    for name in left_out:
        assert torch.equal(ours[name], before[name])
        assert ours[name] not in stepping.state


@pytest.mark.parametrize(
    "name",
    [
        "embedding.position_embeddings.weight",
        "output_layer.weight",
        "decoder.layers.3.mlp.shared_experts.gate_weight",
        "decoder.layers.3.self_attention.linear_qkv.adapter.lora_A",
        "decoder.layers.3.self_attention.linear_qkv.adapter.lora_B.linear_q",
        "linear_qkv.lora_A",
    ],
)
def test_tables_gates_and_adapters_are_left_to_adamw(name: str) -> None:
    assert spec().parameter_options(name, True) == {"algorithm": "adamw"}


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"num_ns_steps": 0},
        {"extra_scale_factor": 0.0},
        {"lr_multiplier": 0.0},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        MuonConfig(**options)
