"""Options of the model beside Megatron's, each against a plain decoder, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.testing.models import DENSE
from tests.support.small_runs import standing_model

VOCABULARY, HEADS, GROUPS, WIDTH, EPS = 90, 8, 2, 4, 1e-5
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "bias of q, k, v": {"add_qkv_bias": True},
    "bias of the projection": {"add_linear_proj_bias": True},
    "biases of the mlp": {"add_mlp_bias": True},
    "all biases but the mlp's": {"add_bias_linear": True, "add_mlp_bias": False},
    "all biases but the projection's": {"add_bias_linear": True, "add_linear_proj_bias": False},
    "norms of outputs": {"norm_placement": "post"},
    "norms on both sides": {"norm_placement": "both"},
    "scaled embedding": {"scale_embedding": True, "embedding_multiplier": 0.7},
    "residual": {"residual_multiplier": 0.3},
    "norms and residual": {"norm_placement": "both", "residual_multiplier": 0.3},
    "logits": {"logits_scaling": 0.2},
    "norms of embeddings": {"embedding_layernorm": True},
    "bias of logits": {"add_output_bias": True, "logits_scaling": 0.7},
    "bias of logits, tied, capped": {
        "add_output_bias": True,
        "final_logit_softcapping": 0.5,
        "share_embeddings_and_output_weights": True,
    },
    "unit rows of logits": {"normalize_output_rows": True},
    "unit rows, tied": {"normalize_output_rows": True, "share_embeddings_and_output_weights": True},
    "softcap of logits": {"final_logit_softcapping": 0.5},
    "softcap of scores": {"attn_logit_softcapping": 0.2},
    "softmax scale": {"softmax_scale": 1.7},
    "log-n of queries": {"log_n_scaling_length": 5},
    "learnable sinks": {"softmax_type": "learnable"},
    "sinks of 0": {"softmax_type": "off-by-one"},
    "windows in even layers": {"window_size": [3, 0], "window_attn_skip_freq": 2},
    "windows by layer": {"window_size": [3, 0], "window_attn_skip_freq": [0, 1]},
    "all": {
        "add_qkv_bias": True,
        "add_linear_proj_bias": True,
        "norm_placement": "both",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.2,
        "final_logit_softcapping": 0.5,
        "attn_logit_softcapping": 0.2,
        "softmax_type": "learnable",
        "log_n_scaling_length": 7,
        "window_size": [3, 0],
        "window_attn_skip_freq": 2,
        "share_embeddings_and_output_weights": True,
    },
}


ALL = frozenset({"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"})
BIASED = {
    "bias of q, k, v": {"linear_qkv"},
    "bias of the projection": {"linear_proj"},
    "biases of the mlp": {"linear_fc1", "linear_fc2"},
    "all biases but the mlp's": {"linear_qkv", "linear_proj"},
    "all biases but the projection's": ALL - {"linear_proj"},
    "all": {"linear_qkv", "linear_proj"},
}
"""Linears of each layer that have a bias; none in the other cases."""
INPUTS, OUTPUTS = {"input_layernorm", "pre_mlp_layernorm"}, {"self_attn_bda", "mlp_bda"}
NORMS = {"pre": INPUTS, "post": OUTPUTS, "both": INPUTS | OUTPUTS}
"""Submodules of a layer with a norm, by placement."""


def plain_loss(p: Mapping[str, Tensor], ids: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Mean next-token loss of a decoder without positions, from the description alone.

    Args:
        p: The parameters by their names, unpadded in use.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        if name not in p:
            return x
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * p[name]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ p[f"{name}.weight"].t()
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def capped(x: Tensor, cap: float | None) -> Tensor:
        return x if cap is None else cap * torch.tanh(x / cap)

    factor = options.get("residual_multiplier", 1.0)
    table = p["embedding.word_embeddings.weight"]
    x = norm(table[ids], "embedding.layernorm.weight") * options.get("embedding_multiplier", 1.0)
    if options.get("scale_embedding"):
        x = x * math.sqrt(table.shape[1])
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        h = linear(norm(x, f"{at}.input_layernorm.weight"), f"{at}.self_attention.linear_qkv")
        sinks = p.get(f"{at}.self_attention.core_attention.softmax_offset")
        if options.get("softmax_type") == "off-by-one":
            sinks = torch.zeros(HEADS, dtype=h.dtype)
        out = attention(h, options, layer, capped, sinks)
        out = linear(out, f"{at}.self_attention.linear_proj")
        x = x + factor * norm(out, f"{at}.self_attn_bda.norm.weight")
        h = linear(norm(x, f"{at}.pre_mlp_layernorm.weight"), f"{at}.mlp.linear_fc1")
        gate, up = h.chunk(2, -1)
        out = linear(F.silu(gate) * up, f"{at}.mlp.linear_fc2")
        x = x + factor * norm(out, f"{at}.mlp_bda.norm.weight")
    x = norm(x, "decoder.final_layernorm.weight")
    rows = p.get("output_layer.weight", table)[:VOCABULARY]
    if options.get("normalize_output_rows"):
        rows = rows / rows.square().sum(-1, keepdim=True).sqrt()
    logits = x @ rows.t() / options.get("logits_scaling", 1.0)
    if "output_layer.bias" in p:
        logits = logits + p["output_layer.bias"][:VOCABULARY]
    logits = capped(logits, options.get("final_logit_softcapping"))
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def attention(
    h: Tensor, options: Mapping[str, Any], layer: int, capped: Any, sinks: Tensor | None
) -> Tensor:
    """Attention of [B, S, G * (N/G + 2) * D], head by head.

    Args:
        sinks: A logit of each head, of a key whose value is 0.
    """
    length = torch.arange(h.shape[1])
    distance = length[:, None] - length[None, :]
    hidden = distance < 0
    every = options.get("window_attn_skip_freq")
    if "window_size" in options and (
        every[layer] if isinstance(every, list) else every is None or (layer + 1) % every
    ):
        hidden = hidden | (distance > options["window_size"][0])
    scale = options.get("softmax_scale", WIDTH**-0.5)
    outputs = []
    trained = options.get("log_n_scaling_length", math.inf)
    scale = [scale * max(1.0, math.log(n, trained)) for n in range(1, h.shape[1] + 1)]
    for group in h.unflatten(-1, (GROUPS, -1)).unbind(-2):
        *queries, key, value = group.split(WIDTH, -1)
        for query in queries:
            scores = query @ key.mT * torch.tensor(scale, dtype=h.dtype)[:, None]
            scores = capped(scores, options.get("attn_logit_softcapping"))
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                column = sinks[len(outputs)].expand(*scores.shape[:-1], 1)
                scores = torch.cat((scores, column), -1)
            outputs.append(scores.softmax(-1)[..., : h.shape[1]] @ value)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("label", SWITCHES)
def test_loss_logits_and_gradients_follow_the_plain_formula(label: str) -> None:
    options = SWITCHES[label]
    values = {f"model.{name}": value for name, value in options.items()}
    values |= {"model.position_embedding_type": "none"}
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    with standing_model({**DENSE, **values}) as model:
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
        parameters = dict(model.named_parameters())
        words = [name.split(".")[3:] for name in parameters if ".layers.1." in name]
        assert {w[-2] for w in words if w[-1] == "bias"} == BIASED.get(label, {*()})
        placement = options.get("norm_placement", "pre")
        assert {w[0] for w in words if "norm" in ".".join(w)} == NORMS[placement]
        given = {"position_ids": torch.arange(16).expand(2, 16)}
        kept = torch.ones(2, 16)
        loss = model(ids, labels=ids.roll(-1, 1), loss_mask=kept, **given) / ids.numel()
        loss.backward()
        got = {name: p.grad.clone() for name, p in parameters.items()}
        logits = model(ids, **given)
        copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    wanted = plain_loss(copies, ids, options)
    torch.testing.assert_close(loss.detach(), wanted.detach(), **CLOSE)
    from_logits = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
    torch.testing.assert_close(from_logits, wanted, **CLOSE)
    wanted.backward()
    for name, copy in copies.items():
        assert copy.grad is not None
        assert copy.grad.any(), name
        torch.testing.assert_close(got[name], copy.grad, **CLOSE, msg=name)


def test_each_switch_counts() -> None:
    """No two cases have one loss, so each option has an effect on the formula and the model."""
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    with standing_model({**DENSE, "model.position_embedding_type": "none"}) as model:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
    apart = [
        options
        for label, options in SWITCHES.items()
        if not {"bias", "biases", "norms", "learnable", "all", "tied"}
        & {*label.replace(",", "").split()}
    ]
    assert len({float(plain_loss(parameters, ids, options)) for options in apart}) == len(apart)


def test_log_n_scaling_follows_documents_or_evaluation() -> None:
    ids = torch.randint(VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(0))
    values = {"model.log_n_scaling_length": 3, "model.log_n_scaling_in_training": False}
    places = torch.arange(8)
    with standing_model({**DENSE, **values}) as model:
        given = {"position_ids": places.repeat(2)[None], "document_ends": (8, 16)}
        trained, scaled = (model.train(mode)(ids, **given) for mode in (True, False))
        apart = model(ids.view(2, 8), position_ids=places.expand(2, 8))
        model.log_n_length = None
        plain = model(ids, **given)
    torch.testing.assert_close(scaled.view(2, 8, -1), apart, **CLOSE)
    assert torch.equal(trained, plain)
    same = (scaled == plain).all(-1).view(2, 8)
    assert same.tolist() == [[True] * 3 + [False] * 5] * 2
