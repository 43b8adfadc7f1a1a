"""The parts of the model that options choose, each against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.plugin_api import contracts as c
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import standing_model

VOCABULARY, PADDED = 90, 96
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    """Mean over all tokens."""
    mask = torch.ones(ids.shape)
    return model(ids, labels=ids.roll(-1, 1), loss_mask=mask, **arguments) / ids.numel()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # which recomputation asks for, in place of autograd.grad
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def hidden_states(x: tuple[int, ...] = (16, 2, 32)) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(x, dtype=torch.float64, generator=generator)


# -- vocabulary -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_pad_the_vocabulary_take_no_probability_and_no_gradient(tied: bool) -> None:
    values = {**DENSE, "model.share_embeddings_and_output_weights": tied}
    with standing_model(values) as model:
        logits = model(tokens())
        assert logits.shape == (2, 16, VOCABULARY)
        wanted = F.cross_entropy(logits.flatten(0, 1), tokens().roll(-1, 1).flatten())
        loss = loss_of(model, tokens())
        torch.testing.assert_close(loss, wanted, **CLOSE)
        found = gradients(model, loss)
        tables = [name for name in found if name.endswith(("embeddings.weight", "layer.weight"))]
        assert len(tables) == (1 if tied else 2)
        for name in tables:
            assert found[name].shape[0] == PADDED
            assert not found[name][VOCABULARY:].any()
            assert found[name][:VOCABULARY].any()


def test_a_tied_table_gets_the_sum_of_the_gradients_of_both_uses() -> None:
    with standing_model(DENSE) as model:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        weights["output_layer.weight"].copy_(weights["embedding.word_embeddings.weight"])
        apart = gradients(model, loss_of(model, tokens()))
        loss = loss_of(model, tokens())
        copies = {name: value.clone() for name, value in weights.items()}
    with standing_model({**DENSE, "model.share_embeddings_and_output_weights": True}) as model:
        copies.pop("output_layer.weight")
        model.load_state_dict(copies, strict=False)
        assert copies.keys() == dict(model.named_parameters()).keys()
        tied_loss = loss_of(model, tokens())
        together = gradients(model, tied_loss)
    torch.testing.assert_close(tied_loss, loss, **CLOSE)
    name = "embedding.word_embeddings.weight"
    torch.testing.assert_close(together[name], apart[name] + apart["output_layer.weight"], **CLOSE)


# -- positions --------------------------------------------------------------------------------


def test_learned_positions_are_added_to_the_embeddings() -> None:
    values = {
        **DENSE,
        "model.position_embedding_type": "learned_absolute",
        "model.max_position_embeddings": 24,
    }
    with standing_model(values) as model:
        table = model.embedding.position_embeddings.weight
        assert table.shape == (24, 32)
        assert table.std() > 0.05
        positions = torch.arange(16).expand(2, -1)
        embedded = model.embedding(tokens(), positions)
        rows = model.embedding.word_embeddings.weight[tokens()] + table[:16]
        torch.testing.assert_close(embedded, rows.transpose(0, 1), **CLOSE)
        found = gradients(model, loss_of(model, tokens(), position_ids=positions))
        gradient = found["embedding.position_embeddings.weight"]
        assert gradient[:16].any(dim=1).all()
        assert not gradient[16:].any()


@pytest.mark.parametrize("kind", ["rope", "learned_absolute"])
def test_a_model_sees_the_order_of_its_tokens_and_nothing_ahead(kind: str) -> None:
    with standing_model({**DENSE, "model.position_embedding_type": kind}) as model:
        positions = torch.arange(16).expand(2, -1)
        first = model(tokens(), position_ids=positions)
        changed = tokens()
        changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
        second = model(changed, position_ids=positions)
        assert torch.equal(first[:, :9], second[:, :9])
        assert (first[:, 9:] != second[:, 9:]).any(dim=-1).all()
        swapped = tokens()
        swapped[:, :2] = swapped[:, :2].flip(1)
        assert not torch.allclose(model(swapped, position_ids=positions)[:, 5:], first[:, 5:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model.position_embedding_type": "learned_absolute"},
        {"model.window_size": [3, 0]},
        {"model.recompute_granularity": "selective"},
    ],
    ids=["rope", "learned", "window", "recomputed"],
)
def test_documents_of_one_sequence_are_what_they_are_alone(options: dict[str, Any]) -> None:
    """Their losses' sum, and every gradient of it."""
    ends = (5, 6, 16)
    with standing_model({**DENSE, **options}) as model:
        text = tokens()[:1]
        labels, mask = text.flip(1), torch.ones(1, 16)
        mask[:, 7] = 0

        places = torch.cat([torch.arange(b - a) for a, b in pairwise((0, *ends))])[None]

        def loss(part: slice, **packed: Any) -> Tensor:
            return model(
                text[:, part],
                places[:, part],
                labels=labels[:, part],
                loss_mask=mask[:, part],
                **packed,
            )

        together = loss(slice(0, 16), document_ends=ends)
        got = gradients(model, together)
        apart = torch.stack([loss(slice(a, b)) for a, b in pairwise((0, *ends))]).sum()
        want = gradients(model, apart)
        assert abs(together - apart) <= 1e-10 * apart
        assert abs(loss(slice(0, 16)) - apart) > 1e-3 * apart
        assert got.keys() == want.keys()
        pairs = torch.ones(16, 16, dtype=torch.bool).tril()
        for end in ends[:-1]:
            pairs[end:, :end] = False
        # The same said of every pair of positions, of which a row sees another's nothing.
        dense = gradients(model, loss(slice(0, 16), attention_mask=pairs[None]))
        for name, gradient in want.items():
            for found in (got[name], dense[name]):
                assert (found - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name


# -- attention --------------------------------------------------------------------------------


def plain_attention(
    module: nn.Module,
    x: Tensor,
    tables: Tensor | None,
    scale: float,
    norms: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Grouped-query attention, head by head.

    Args:
        norms: Weights of the normalisation of queries and of keys; None without one.
    """
    mixed = x @ module.linear_qkv.weight.t()
    heads, groups, width = 8, 2, 4
    per_group = heads // groups
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    outputs = []
    for head in range(heads):
        start = head // per_group * (per_group + 2) * width
        places = (head % per_group, per_group, per_group + 1)
        q, k, v = (mixed[..., start + i * width : start + (i + 1) * width] for i in places)
        if norms is not None:
            q, k = (
                t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
                for t, weight in zip((q, k), norms, strict=True)
            )
        if tables is not None:
            q, k = (rotated(t, tables) for t in (q, k))
        scores = torch.einsum("sbd,tbd->bst", q, k) * scale
        probabilities = scores.masked_fill(mask, -math.inf).softmax(dim=-1)
        outputs.append(torch.einsum("bst,tbd->sbd", probabilities, v))
    return torch.cat(outputs, dim=-1) @ module.linear_proj.weight.t()


def rotated(x: Tensor, tables: Tensor) -> Tensor:
    """The first R entries as R/2 complex numbers, each times its own unit."""
    cos, sin = tables[:, :, None]
    turn, keep = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turn.chunk(2, dim=-1)
    cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, keep), dim=-1)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0.5),
        ({"model.qk_layernorm": True}, 0.5),
        ({"model.qk_l2_norm": True}, 0.5),
        ({"model.qk_l2_norm": True, "model.position_embedding_type": "none"}, 0.5),
        ({"model.softmax_scale": 0.3}, 0.3),
        ({"model.rotary_percent": 0.5}, 0.5),
    ],
    ids=["plain", "qk_layernorm", "l2", "l2 unrotated", "softmax_scale", "half rotated"],
)
def test_self_attention_and_its_gradients_are_those_of_the_plain_formula(
    options: dict[str, Any], scale: float
) -> None:
    with standing_model({**DENSE, **options}) as model:
        module = model.decoder.layers[0].self_attention
        norms = None
        if "model.qk_layernorm" in options:
            norms = (module.q_layernorm.weight, module.k_layernorm.weight)
            for weight in norms:
                weight.data.copy_(torch.linspace(0.5, 2.0, 4))
        elif "model.qk_l2_norm" in options:
            norms = (torch.ones(4), torch.ones(4))
        tables = model.rotary and model.rotary(16, torch.float64, torch.device("cpu"))
        x = hidden_states().requires_grad_()
        got, bias = module(x, rotary_pos_emb=tables)
        assert bias is None
        wanted = plain_attention(module, x, tables, scale, norms)
        torch.testing.assert_close(got, wanted, **CLOSE)
        inputs = (x, *module.parameters())
        dout = hidden_states().flip(0)
        pairs = zip(
            torch.autograd.grad(got, inputs, dout),
            torch.autograd.grad(wanted, inputs, dout),
            strict=True,
        )
        for gradient, right in pairs:
            torch.testing.assert_close(gradient, right, **CLOSE)


class SeedsOnly:
    """A kernel that notes the dropout that it is asked for."""

    features = c.AttentionFeatures(dropout=True)
    backward_reads: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.seen: list[c.Dropout | None] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec) -> c.AttentionResult:
        self.seen.append(spec.dropout)
        return c.AttentionResult(q, q[..., 0])

    def backward(self, dout: Tensor, *_: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError


def test_dropout_is_drawn_anew_in_every_call_and_only_in_training() -> None:
    with standing_model({**DENSE, "model.attention_dropout": 0.25}) as model:
        module = model.decoder.layers[0].self_attention.core_attention
        module.kernel = kernel = SeedsOnly()
        q = hidden_states((16, 2, 8, 4))
        for training in (True, True, False):
            module.train(training)
            module(q, q, q)
        first, second, none = kernel.seen
        assert none is None
        assert first is not None
        assert second is not None
        assert first.probability == second.probability == 0.25
        assert first.seed != second.seed


def dropout_seed(values: dict[str, Any]) -> int:
    """Job: what this rank's kernel is asked for."""
    with standing_model(values) as model:
        module = model.decoder.layers[0].self_attention.core_attention
        module.kernel = kernel = SeedsOnly()
        q = hidden_states((16, 2, 4, 4))
        torch.manual_seed(5)
        module(q, q, q)
        (dropout,) = kernel.seen
        assert dropout is not None
        return dropout.seed


def test_tensor_parallel_ranks_drop_apart_since_their_heads_differ(gloo_pool: GlooPool) -> None:
    layout = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
    values = {**DENSE, **layout, "model.attention_dropout": 0.25}
    seeds = gloo_pool.run(dropout_seed, 2, values)
    assert len(set(seeds)) == 2
    assert gloo_pool.run(dropout_seed, 2, values) == seeds


# -- recomputation ----------------------------------------------------------------------------

FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (DENSE, {**FULL, "recompute_method": "uniform"}),
        (DENSE, {**FULL, "recompute_method": "block"}),
        (DENSE, {"recompute_granularity": "selective"}),
        (DENSE, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
        (MOE, {**FULL, "recompute_method": "uniform"}),
        (MOE, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ],
    ids=["full", "block", "core_attn", "mlp", "moe full", "moe"],
)
def test_recomputation_runs_again_and_changes_no_bit_under_dropout(
    values: dict[str, Any], options: dict[str, Any]
) -> None:
    dropout = {"model.attention_dropout": 0.2, "model.hidden_dropout": 0.2}
    outcomes = []
    for chosen in ({}, options):
        recompute = {f"model.{name}": value for name, value in chosen.items()}
        with standing_model({**values, **dropout, **recompute}, torch.float32) as model:
            calls = []
            layer = model.decoder.layers[0]
            feed_forward_part = layer.mlp.router if values is MOE else layer.mlp
            for module in (layer.self_attention.core_attention, feed_forward_part):
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            torch.manual_seed(9)
            loss = loss_of(model, tokens())
            found = gradients(model, loss)
            outcomes.append((len(calls), loss, *found.values()))
    (plain_calls, *plain), (calls, *recomputed) = outcomes
    assert plain_calls == 2
    assert calls > 2
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


# -- feed-forwards ----------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


def feed_forward(x: Tensor, fc1: Tensor, fc2: Tensor, activation: str, gated: bool) -> Tensor:
    function, inner = ACTIVATIONS[activation], x @ fc1.t()
    if gated:
        gate, up = inner.chunk(2, dim=-1)
        return (function(gate) * up) @ fc2.t()
    return function(inner) @ fc2.t()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_dense_feed_forward_is_its_formula(activation: str, gated: bool) -> None:
    options = {"model.activation": activation, "model.gated_linear_unit": gated}
    with standing_model({**DENSE, **options}) as model:
        mlp = model.decoder.layers[0].mlp
        fc1, fc2 = mlp.linear_fc1.weight, mlp.linear_fc2.weight
        assert fc1.shape == (96 if gated else 48, 32)
        x = hidden_states()
        got, _ = mlp(x)
        torch.testing.assert_close(got, feed_forward(x, fc1, fc2, activation, gated), **CLOSE)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "squared_relu"])
def test_experts_are_their_formula(activation: str, gated: bool) -> None:
    options = {"model.activation": activation, "model.gated_linear_unit": gated}
    with standing_model({**MOE, **options, "model.moe_aux_loss_coeff": 0.0}) as model:
        moe = model.decoder.layers[0].mlp
        x = hidden_states()
        got, _ = moe(x)
        wanted = routed(moe, x, activation, gated)
        torch.testing.assert_close(got, wanted, **CLOSE)
        inputs = (moe.router.weight, moe.experts.fc1, moe.experts.fc2)
        dout = hidden_states().flip(0)
        pairs = zip(
            torch.autograd.grad(got, inputs, dout),
            torch.autograd.grad(wanted, inputs, dout),
            strict=True,
        )
        for gradient, right in pairs:
            torch.testing.assert_close(gradient, right, **CLOSE)


def routed(moe: nn.Module, x: Tensor, activation: str, gated: bool) -> Tensor:
    """Every expert on every token, weighed: no token is moved anywhere."""
    weights, _ = moe.router(x)
    outputs = [
        feed_forward(x.flatten(0, 1), fc1, fc2, activation, gated) * weights[:, expert, None]
        for expert, (fc1, fc2) in enumerate(zip(moe.experts.fc1, moe.experts.fc2, strict=True))
    ]
    return sum(outputs).view_as(x)


@pytest.mark.parametrize("gate", [False, True])
def test_a_shared_expert_takes_every_token_beside_the_chosen_ones(gate: bool) -> None:
    options = {
        "model.moe_shared_expert_intermediate_size": 24,
        "model.moe_shared_expert_gate": gate,
        "model.moe_aux_loss_coeff": 0.0,
    }
    with standing_model({**MOE, **options}) as model:
        moe = model.decoder.layers[0].mlp
        shared = moe.shared_experts
        x = hidden_states()
        own = feed_forward(x, shared.linear_fc1.weight, shared.linear_fc2.weight, "silu", True)
        if gate:
            own = own * (x @ shared.gate_weight.t()).sigmoid()
        got, _ = moe(x)
        torch.testing.assert_close(got, routed(moe, x, "silu", True) + own, **CLOSE)
        assert shared.linear_fc1.weight.std() > 0.05


def test_only_the_named_layers_have_experts() -> None:
    with standing_model({**MOE, "model.moe_layer_freq": [0, 1]}) as model:
        assert [hasattr(layer.mlp, "router") for layer in model.decoder.layers] == [False, True]
    with standing_model({**MOE, "model.num_layers": 3, "model.moe_layer_freq": 2}) as model:
        kinds = [hasattr(layer.mlp, "router") for layer in model.decoder.layers]
        assert kinds == [True, False, True]
