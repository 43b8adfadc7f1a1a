"""The optimizer against AdamW written out, its weight decay and its clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.plugin_api import OptimizerSpec
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import Training, Values, training

FLAT = {
    **DENSE,
    "optimizer.lr": 0.01,
    "optimizer.lr_decay_style": "constant",
    "optimizer.lr_warmup_iters": 0,
    "optimizer.weight_decay": 0.5,
    "optimizer.clip_grad": 0.0,
    "train.micro_batch_size": 4,
}
EP = {"parallel.expert_model_parallel_size": 2}
TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


def cloned(run: Training) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.parameters.items()}


def record_gradients(run: Training) -> dict[str, Tensor]:
    """Filled by the next step with what the inner optimizer is given."""
    seen: dict[str, Tensor] = {}
    inner = run.bundle.optimizer.optimizer
    (chunk,) = run.bundle.chunks

    def note(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in chunk.module.named_parameters()})

    inner.register_step_pre_hook(note)
    return seen


@pytest.mark.parametrize("values", [FLAT, {**MOE, **FLAT, "model.family": MOE["model.family"]}])
def test_two_steps_are_adamws_and_only_matrices_decay(values: Values) -> None:
    beta1, beta2, eps, lr, decay = 0.9, 0.95, 1e-3, 0.01, 0.5
    with training(values) as run:
        weights = cloned(run)
        first = {name: torch.zeros_like(w) for name, w in weights.items()}
        second = {name: torch.zeros_like(w) for name, w in weights.items()}
        gradients = record_gradients(run)
        for step in (1, 2):
            run.step()
            for name, w in weights.items():
                g = gradients[name]
                first[name] = beta1 * first[name] + (1 - beta1) * g
                second[name] = beta2 * second[name] + (1 - beta2) * g**2
                scaled = second[name] / (1 - beta2**step)
                w *= 1 - lr * (decay if w.dim() > 1 else 0.0)
                w -= lr * first[name] / (1 - beta1**step) / (scaled.sqrt() + eps)
                torch.testing.assert_close(run.parameters[name], w, rtol=2e-5, atol=1e-6)


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_are_clipped_and_the_norm_before_is_returned(precision: str) -> None:
    found = {}
    for limit in (0.0, 0.05, 1e6):
        options = {"train.precision": precision, "optimizer.clip_grad": limit}
        with training({**FLAT, **options, "optimizer.initial_loss_scale": 16.0}) as run:
            inner = run.bundle.optimizer.optimizer
            seen: list[Tensor] = []
            inner.register_step_pre_hook(
                lambda inner, *_, seen=seen: seen.extend(
                    p.grad.clone() for group in inner.param_groups for p in group["params"]
                )
            )
            told = run.step().grad_norm
            found[limit] = (told, norm(dict(enumerate(seen))))
    told, before = found[0.0]
    assert before > 0.1
    assert told == pytest.approx(before, rel=1e-5)
    assert found[0.05] == pytest.approx((before, 0.05), rel=1e-4)
    assert found[1e6] == pytest.approx((before, before), rel=1e-5)


def norms_and_weights(values: Values) -> tuple[list[float | None], dict[str, Tensor]]:
    with training(values) as run:
        norms = [run.step().grad_norm for _ in range(2)]
        return norms, cloned(run)


@pytest.mark.exhaustive(by=lambda layout, world_size: [*layout, world_size])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(EP, 2), (TP, 2), ({**TP, **EP}, 2), ({**TP, **EP}, 4)],
    ids=["ep", "tp", "tp ep", "tp ep dp"],
)
def test_every_layout_is_clipped_by_the_norm_of_all(
    gloo_pool: GlooPool, layout: Values, world_size: int
) -> None:
    values = {
        **MOE,
        "model.moe_aux_loss_coeff": 0.0,
        "model.add_expert_bias": True,
        "model.add_output_bias": True,
        "model.add_router_bias": True,
        "optimizer.clip_grad": 0.05,
        "train.micro_batch_size": 1,
    }
    ((alone, weights),) = gloo_pool.run(norms_and_weights, 1, values)
    for norms, others in gloo_pool.run(norms_and_weights, world_size, {**values, **layout}):
        assert norms == pytest.approx(alone, rel=1e-5)
        name = "decoder.layers.1.mlp.router.weight"
        torch.testing.assert_close(others[name], weights[name], rtol=1e-4, atol=1e-6)


def test_biases_have_no_weight_decay_where_experts_stack_them() -> None:
    from ascend_run.core.train.optimizer import parameter_groups

    with training({**MOE, "model.add_expert_bias": True}) as run:
        (chunk,) = run.bundle.chunks
        groups = parameter_groups([chunk], run.context.config)
        names = {id(p): name for name, p in chunk.named_parameters()}
        decay = {names[id(p)]: group["wd_mult"] for group in groups for p in group["params"]}
    of_experts = {n: factor for n, factor in decay.items() if ".layers.1.mlp.experts." in n}
    assert len(of_experts) == 4
    assert all(factor == (not n.endswith("bias")) for n, factor in of_experts.items())


def test_a_parameter_that_takes_no_gradient_is_in_no_group() -> None:
    from ascend_run.core.train.optimizer import parameter_groups

    with training(FLAT) as run:
        (chunk,) = run.bundle.chunks
        frozen = chunk.module.embedding.word_embeddings.weight
        frozen.requires_grad_(False)
        groups = parameter_groups([chunk], run.context.config)
        held = [p for group in groups for p in group["params"]]
        assert len(held) == len(list(chunk.parameters())) - 1
        assert all(p is not frozen for p in held)
        assert [group["wd_mult"] for group in groups] == [1.0, 0.0]


def test_parameters_with_options_of_their_own_are_in_groups_of_their_own() -> None:
    from ascend_run.core.train.optimizer import parameter_groups

    asked: dict[str, bool] = {}

    def options_of(name: str, is_matrix: bool) -> dict[str, Any]:
        asked[name] = is_matrix
        return {"kind": "table"} if name.startswith(("embedding.", "output_")) else {}

    spec = OptimizerSpec(build=list, states={}, element_wise=True, parameter_options=options_of)
    with training({**MOE, "model.add_expert_bias": True}) as run:
        (chunk,) = run.bundle.chunks
        groups = parameter_groups([chunk], run.context.config, spec)
        plain = parameter_groups([chunk], run.context.config)
        names = {id(p): name for name, p in chunk.module.named_parameters()}
    assert asked.keys() == {*names.values()}
    matrices = {name for name, is_matrix in asked.items() if is_matrix}
    assert {name for name in asked if name.endswith(("norm.weight", "_bias"))} == {
        *asked
    } - matrices
    found = [
        (sorted(names[id(p)] for p in g["params"]), g.get("kind"), g["wd_mult"]) for g in groups
    ]
    tables = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert sorted(found) == sorted(
        [
            (sorted(tables), "table", 1.0),
            (sorted(matrices - tables), None, 1.0),
            (sorted({*asked} - matrices), None, 0.0),
        ]
    )
    assert [len(g["params"]) for g in plain] == [len(matrices), len(asked) - len(matrices)]
