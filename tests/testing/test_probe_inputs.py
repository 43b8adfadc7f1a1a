"""Batches and weights contain the cases in which faults hide."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ascend_run.ops.experts.routing import routing_scores
from ascend_run.testing import probe_weights
from ascend_run.testing.models import DENSE, END_OF_DOCUMENT, samples
from ascend_run.testing.probe_offsets import put_at_offsets

ROWS = samples(DENSE, 8)
LENGTH = int(str(DENSE["data.seq_length"]))


def test_a_longer_dataset_begins_with_a_shorter_one() -> None:
    for one, other in zip(samples(DENSE, 3), ROWS, strict=False):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_train_unequal_numbers_of_tokens() -> None:
    trained = [int(row["loss_mask"].sum()) for row in ROWS]
    assert {0, 1, LENGTH} < {*trained}
    assert trained[3] == trained[7] == 0  # the last row of four
    assert len({*trained[:4]}) == 4


def test_a_row_ends_with_padding() -> None:
    assert any(row["loss_mask"][0] and not row["loss_mask"][-1] for row in ROWS)


def test_rows_hold_documents_of_unequal_lengths() -> None:
    for row in ROWS:
        ends = (row["tokens"] == END_OF_DOCUMENT).nonzero().flatten().tolist()
        lengths = [b - a for a, b in zip([-1, *ends], ends, strict=False)]
        assert len({*lengths}) > 1
        assert 1 in lengths


def scores_of(change: Callable[[torch.Tensor], None], x: torch.Tensor) -> torch.Tensor:
    router = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    change(router)
    return x @ router.t()


def hidden(count: int) -> torch.Tensor:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 3 * x[:, 0].abs() + 10
    return x


def test_one_expert_gets_all_tokens_and_one_none() -> None:
    chosen = scores_of(probe_weights._all_and_none, hidden(64)).topk(2).indices
    counts = [int((chosen == expert).sum()) for expert in range(4)]
    assert counts[2] == 64
    assert counts[1] == 0
    assert counts[0] > 0
    assert counts[3] > 0


def test_two_experts_tie_for_every_token_in_any_order_of_the_sum() -> None:
    x = hidden(64)
    scores = scores_of(probe_weights._two_ties, x)
    assert torch.equal(scores[:, 1], scores[:, 3])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(2))
    router = torch.randn(4, 6)
    probe_weights._two_ties(router)
    assert torch.equal((x[:, order] @ router[:, order].t())[:, 1], scores[:, 1])
    ordered = scores.sort(descending=True).values
    assert int((ordered[:, 1] == ordered[:, 2]).sum()) > 10


def test_a_bias_of_the_choice_makes_scores_negative_and_changes_no_choice() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    bias = torch.zeros(8)
    expected = routing_scores(logits, 3, "sigmoid", False, groups=(2, 1), bias_X=bias)
    probe_weights._below_zero(bias)
    assert (logits.sigmoid() + bias < 0).all()
    found = routing_scores(logits, 3, "sigmoid", False, groups=(2, 1), bias_X=bias)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class TwoLayers(nn.Module):
    """Layers with an MLP block, numbered as Megatron's are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for number, layer in enumerate(self.layers, start=1):
            layer.layer_number, layer.mlp = number, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.get_submodule("mlp")(x)
        return x


def test_an_odd_layer_saves_a_tensor_at_an_offset() -> None:
    model, x = TwoLayers(), torch.randn(3, 4, requires_grad=True)
    offsets: list[int] = []

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == x.shape:
            offsets.append(int(tensor.storage_offset()))
        return tensor

    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    calls: list[None] = []
    put_at_offsets([model], lambda: calls.append(None))
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        out = model(x)
    found = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    assert (offsets, len(calls)) == ([0, 16], 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
