"""Multi-token prediction against the formulas of arXiv:2412.19437, section 2.2, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE, MOE
from tests.support.small_runs import standing_model

ROWS, LENGTH, VOCABULARY, WIDTH, EPS = 2, 16, 90, 4, 1e-5
Weights = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS)


def turned(x_SD: Tensor) -> Tensor:
    """RoPE: each pair (i, i + D / 2) as one complex number."""
    length, width = x_SD.shape
    speed = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * speed
    pairs = torch.complex(*x_SD.chunk(2, dim=1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = (x @ up.t()).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * value) @ down.t()


def attended(x_SH: Tensor, w: Weights, name: str) -> Tensor:
    """8 heads, 2 of keys and values; Megatron's order of the rows of ``linear_qkv``."""
    blocks = (x_SH @ w[f"{name}.linear_qkv.weight"].t()).split(WIDTH, dim=1)
    future = torch.ones(len(x_SH), len(x_SH), dtype=torch.bool).triu(1)
    heads = []
    for head in range(8):
        first = head // 4 * 6
        q, k, v = (blocks[first + at] for at in (head % 4, 4, 5))
        scores = turned(q) @ turned(k).t() / WIDTH**0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(dim=1) @ v)
    return torch.cat(heads, dim=1) @ w[f"{name}.linear_proj.weight"].t()


def routed(x_SH: Tensor, w: Weights, name: str) -> Tensor:
    """Softmax over the two best of four experts, token by token."""
    rows = []
    for token in x_SH:
        logits = w[f"{name}.router.weight"] @ token
        best = sorted(range(4), key=lambda expert: -float(logits[expert].detach()))[:2]
        shares = logits[best].softmax(dim=0)
        fc1, fc2 = (w[f"{name}.experts.{which}"] for which in ("fc1", "fc2"))
        rows.append(
            sum(s * gated(token, fc1[e], fc2[e]) for s, e in zip(shares, best, strict=True))
        )
    return torch.stack(rows)


def transformer_layer(x_SH: Tensor, w: Weights, name: str) -> Tensor:
    normed = rms(x_SH, w[f"{name}.input_layernorm.weight"])
    x_SH = x_SH + attended(normed, w, f"{name}.self_attention")
    normed = rms(x_SH, w[f"{name}.pre_mlp_layernorm.weight"])
    if f"{name}.mlp.router.weight" in w:
        return x_SH + routed(normed, w, f"{name}.mlp")
    fc1, fc2 = (w[f"{name}.mlp.linear_{which}.weight"] for which in ("fc1", "fc2"))
    return x_SH + gated(normed, fc1, fc2)


def document_losses(
    w: Weights, ids_S: Tensor, labels_S: Tensor, kept_S: Tensor, depths: int
) -> list[Tensor]:
    """Loss sums of depth 0, 1, ... of one document; depth k is computed for its T - k tokens."""
    table = w["embedding.word_embeddings.weight"]
    head = w.get("output_layer.weight", table)[:VOCABULARY]
    hidden = table[ids_S]
    for layer in range(2):
        hidden = transformer_layer(hidden, w, f"decoder.layers.{layer}")
    hidden = rms(hidden, w["decoder.final_layernorm.weight"])
    losses = []
    for depth in range(depths + 1):
        if depth:
            name, left = f"mtp.layers.{depth - 1}", max(len(ids_S) - depth, 0)
            ahead = rms(table[ids_S[depth:]], w[f"{name}.enorm.weight"])
            both = torch.cat((ahead, rms(hidden[:left], w[f"{name}.hnorm.weight"])), dim=1)
            mixed = both @ w[f"{name}.eh_proj.weight"].t()
            hidden = mixed
            if left:
                hidden = transformer_layer(mixed, w, f"{name}.transformer_layer")
            hidden = rms(hidden, w[f"{name}.final_layernorm.weight"])
        logits = hidden @ head.t()
        picked = logits.gather(1, labels_S[depth:, None])[:, 0]
        losses.append(((logits.logsumexp(dim=1) - picked) * kept_S[depth:]).sum())
    return losses


@pytest.mark.parametrize(
    ("values", "depths", "ends"),
    [
        ({**DENSE, "model.mtp_loss_scaling_factor": 0.3}, 1, None),
        ({**DENSE, "model.share_embeddings_and_output_weights": True}, 2, (5, 6, 16)),
        (
            {
                **DENSE,
                "model.recompute_granularity": "full",
                "model.recompute_method": "uniform",
                "model.recompute_num_layers": 1,
            },
            1,
            (7, 16),
        ),
        ({**MOE, "model.moe_aux_loss_coeff": 0.0, "model.rotary_base": 10_000}, 2, (16,)),
    ],
    ids=["untied", "tied, documents", "recomputed, documents", "experts"],
)
def test_losses_and_gradients_of_every_depth(
    values: Mapping[str, Any], depths: int, ends: tuple[int, ...] | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (ROWS, LENGTH)
    ids, labels = torch.randint(VOCABULARY, (2, *shape), generator=generator).unbind(0)
    kept = torch.randint(4, shape, generator=generator).clamp(max=1).float()
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    with standing_model({**values, "model.mtp_num_layers": depths}) as model:
        batch = {"labels": labels, "loss_mask": kept, "document_ends": ends}
        loss = model(ids, positions, **batch)
        loss.backward()
        read = model.take_mtp_losses()
        assert model.take_mtp_losses() is None
        w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        got = {name: p.grad for name, p in model.named_parameters()}
        model.eval()
        assert model(ids, positions, **batch) == loss
        assert model.take_mtp_losses() is None

    parts = [slice(*ends) for ends in pairwise((0, *(ends or (LENGTH,))))]
    rows = [(ids[r, p], labels[r, p], kept[r, p].double()) for r in range(ROWS) for p in parts]
    losses = zip(*(document_losses(w, *row, depths) for row in rows), strict=True)
    loss_sum, *of_depths = (torch.stack(of).sum() for of in losses)
    factor = values.get("model.mtp_loss_scaling_factor", 0.1)
    (loss_sum + factor / depths * torch.stack(of_depths).sum()).backward()
    torch.testing.assert_close(loss, loss_sum, rtol=1e-12, atol=0)
    counts = [sum(float(k[depth:].sum()) for *_, k in rows) for depth in range(1, depths + 1)]
    wanted = torch.stack((torch.stack(of_depths).detach(), torch.tensor(counts).double()), dim=1)
    torch.testing.assert_close(read, wanted, rtol=1e-12, atol=0)
    assert got.keys() == w.keys()
    for name, weight in w.items():
        assert weight.grad.any(), name
        assert (got[name] - weight.grad).abs().max() <= 1e-10 * weight.grad.abs().max(), name


def test_the_residual_stream_of_every_depth_is_wide_too() -> None:
    values = {**DENSE, "train.precision": "bf16", "model.fp32_residual_connection": True}
    with standing_model({**values, "model.mtp_num_layers": 1}, dtype=torch.bfloat16) as model:
        seen = []
        layer = model.mtp.layers[0].transformer_layer
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["hidden_states"].dtype), with_kwargs=True
        )
        ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
        model(ids, labels=ids, loss_mask=torch.ones(ROWS, LENGTH)).backward()
        assert seen == [torch.float32]
        assert model.mtp.layers[0].eh_proj.weight.grad.any()
