"""``model.fp32_residual_connection``: a float32 stream through a model of half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import Values, standing_model, training

WIDE = {"model.fp32_residual_connection": True}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS: dict[str, tuple[tuple[str, ...], Values]] = {
    "pipeline": ((), {**DENSE, "parallel.pipeline_model_parallel_size": 2}),
    "sequence-parallel": (
        (),
        {
            **DENSE,
            "parallel.tensor_model_parallel_size": 2,
            "parallel.sequence_parallel": True,
        },
    ),
    "experts": ((), {**MOE, "parallel.expert_model_parallel_size": 2}),
    "pipeline-recomputed": (
        (),
        {
            **DENSE,
            "parallel.pipeline_model_parallel_size": 2,
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        },
    ),
}


def tokens() -> Tensor:
    return torch.randint(90, (2, 16), generator=torch.Generator().manual_seed(0))


def gradients_of(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch."""
    model.zero_grad()
    loss = model(tokens(), labels=tokens().roll(-1, 1), loss_mask=torch.ones(2, 16)) / 32
    (loss * 64).backward()  # above what float16 flushes to zero
    return float(loss), {n: p.grad / 64 for n, p in model.named_parameters() if p.grad is not None}


def plain_layer(layer: nn.Module, x: Tensor, tables: Tensor) -> Tensor:
    """A pre-norm layer: each sublayer reads the stream in its own dtype, and adds to the stream."""
    for norm, sublayer in (
        (layer.input_layernorm, lambda h: layer.self_attention(h, rotary_pos_emb=tables)),
        (layer.pre_mlp_layernorm, layer.mlp),
    ):
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        out, _ = sublayer((scaled * norm.weight.float()).to(norm.weight.dtype))
        x = x + out.float()
    return x


@pytest.mark.parametrize("precision", DTYPES)
def test_a_layer_is_the_plain_formula_on_a_float32_stream(precision: str) -> None:
    """Values and the gradients of the stream and of every parameter."""
    values, dtype = {**DENSE, **WIDE, "train.precision": precision}, DTYPES[precision]
    with standing_model(values, dtype=dtype) as model:
        embedded = model.embedding(tokens(), None)
        assert embedded.dtype is torch.float32
        assert {p.dtype for p in model.parameters()} == {dtype}
        layer, tables = model.decoder.layers[1], model._rotary_tables(tokens(), None)
        x = embedded.detach().requires_grad_()
        dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        inputs = (x, *layer.parameters())
        out, _ = layer(x, rotary_pos_emb=tables)
        want = plain_layer(layer, x, tables)
        assert out.dtype is want.dtype is torch.float32
        # What is added is rounded to the dtype; how the norm was summed may move it by one unit.
        torch.testing.assert_close(out, want, rtol=0, atol=2 * torch.finfo(dtype).eps)
        assert not torch.equal(out, out.to(dtype).float()), "the stream is as narrow as its parts"
        got = torch.autograd.grad(out, inputs, dout)
        for mine, plain in zip(got, torch.autograd.grad(want, inputs, dout), strict=True):
            error = (mine.float() - plain.float()).abs().max() / plain.float().abs().max()
            assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.exhaustive
@pytest.mark.parametrize("values", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("more", [{}, {"model.normalization": "LayerNorm"}], ids=["rms", "layer"])
@pytest.mark.parametrize("precision", DTYPES)
def test_a_wide_stream_is_nearer_to_float64(values: Values, more: Values, precision: str) -> None:
    """Than a narrow one: the gradients of all parameters together, on the same weights."""
    options = {**values, **more, "model.num_layers": 8, "train.precision": precision}
    dtype, found = DTYPES[precision], []
    with standing_model(options, dtype=dtype) as narrow:
        weights = {name: p.detach().clone() for name, p in narrow.named_parameters()}
        found.append(gradients_of(narrow)[1])
    with standing_model({**options, **WIDE}, dtype=dtype) as wide:
        found.append(gradients_of(wide)[1])
    with standing_model({**options, **WIDE}) as exact:
        for name, parameter in exact.named_parameters():
            parameter.data.copy_(weights[name])
        right = gradients_of(exact)[1]
        assert all(g.dtype is torch.float64 for g in right.values())
        assert exact.embedding(tokens(), None).dtype is torch.float64
    assert found[0].keys() == found[1].keys() == right.keys()
    apart = [sum(float((g[n].double() - right[n]).square().sum()) for n in right) for g in found]
    assert apart[1] < apart[0]


def steps(values: Values, enable: tuple[str, ...] = ()) -> tuple[list[float], set[Any]]:
    """Job: losses of five steps, and the dtypes of what enters this rank's layers."""
    with training(values, enable) as run:
        seen: set[Any] = set()
        for chunk in run.bundle.chunks:
            for layer in chunk.module.decoder.layers:
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs: seen.add(
                        (args[0] if args else kwargs["hidden_states"]).dtype
                    ),
                    with_kwargs=True,
                )
        return [run.step().loss for _ in range(5)], seen


@pytest.mark.exhaustive(by=lambda name: [bool(LAYOUTS[name][0])])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wide_stream_trains_alike_in_every_layout(gloo_pool: GlooPool, name: str) -> None:
    """Between stages the stream is sent in float32; layouts sum in another order."""
    enable, values = LAYOUTS[name]
    asked = {**values, **WIDE, "train.precision": "bf16"}
    alone = {key: value for key, value in asked.items() if not key.startswith("parallel.")}
    ((wanted, _),) = gloo_pool.run(steps, 1, alone, enable, timeout=120)
    assert wanted[-1] < wanted[0]
    for losses, dtypes in gloo_pool.run(steps, 2, asked, enable, timeout=120):
        assert dtypes == {torch.float32}
        assert losses == pytest.approx(wanted, rel=2e-3)


@pytest.mark.needs_plugins("lora", "swap-attention", "rms-norm")
@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("lora", {}),
        ("swap-attention", {"plugins.swap-attention.min_bytes": 1}),
        ("rms-norm", {"plugins.rms-norm.kernel": "torch"}),
    ],
)
def test_plugins_train_on_a_wide_stream(plugin: str, options: Values) -> None:
    """To the losses without them: what they add is nothing at first, or nothing at all."""
    values = {**DENSE, **WIDE, "train.precision": "bf16"}
    without, _ = steps(values)
    losses, dtypes = steps({**values, **options}, (plugin,))
    assert dtypes == {torch.float32}
    count = 1 if plugin == "lora" else 5
    assert losses[:count] == pytest.approx(without[:count], rel=2e-3)
    assert losses[-1] < losses[0]


def test_dropout_leaves_the_stream_wide() -> None:
    values = {**DENSE, **WIDE, "train.precision": "bf16", "model.hidden_dropout": 0.5}
    with standing_model(values, dtype=torch.bfloat16) as model:
        layer, x = model.decoder.layers[0], torch.ones(16, 2, 32)
        layer.mlp.forward = lambda h, **_: (torch.full_like(h, 2.0**-12), None)
        layer.self_attention.forward = lambda h, **_: (torch.zeros_like(h), None)
        out, _ = layer(x)
        assert out.unique().tolist() == [1.0, 1.0 + 2.0**-11]
        assert torch.equal(layer.eval()(x)[0], x + 2.0**-12)


def test_a_float32_model_is_left_as_it_is() -> None:
    with standing_model({**DENSE, **WIDE}, dtype=torch.float32) as wide:
        found = gradients_of(wide)
    with standing_model(DENSE, dtype=torch.float32) as plain:
        torch.testing.assert_close(found, gradients_of(plain), rtol=0, atol=0)
