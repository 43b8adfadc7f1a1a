"""The loss of every token, against the run's loss sum and all logits, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.plugin_api import ForwardLink, LinkPlace
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.types.forward import Forward
from tests.support.fake_plugins import plugin
from tests.support.small_runs import standing_model

ROWS, LENGTH = 2, 16
MODELS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "tied": {"model.share_embeddings_and_output_weights": True},
    "capped": {"model.final_logit_softcapping": 0.7, "model.add_output_bias": True},
}
TP_2 = {"parallel.tensor_model_parallel_size": 2}
SP = {**TP_2, "parallel.sequence_parallel": True}


def linked(model: nn.Module) -> dict[str, ForwardLink]:
    """Multiply the logits by 1.5."""

    def wrap(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits, bias = inner(*args, **kwargs)
            return logits * 1.5, bias

        return forward

    return {"output_layer": ForwardLink(wrap=wrap, compilable=True)}


@contextmanager
def built(values: Mapping[str, Any], wraps: bool) -> Iterator[nn.Module]:
    """Build a model in float64, whose output layer a plugin wraps or not."""
    links = {"output_layer": LinkPlace.AROUND}
    scaling = plugin("scaling", {"ascend_model": lambda self: linked}, forward_links=links)
    plugins = [scaling()] if wraps else []
    with standing_model({**DENSE, **values}, torch.float64, (), *plugins) as model:
        if model.output_layer.bias is not None:
            nn.init.normal_(model.output_layer.bias)
        yield model


def batch() -> dict[str, Tensor]:
    """Token ids, labels and a mask of 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(90, (2, ROWS, LENGTH), generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.6
    return {"input_ids": ids, "labels": labels, "loss_mask": mask.float()}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert gradient.any(), name
        assert (got[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_losses_of_tokens_add_up_to_the_loss_sum(values: Mapping[str, Any], wraps: bool) -> None:
    """With the gradients of every parameter."""
    with built(values, wraps) as model:
        losses, loss = model(**batch(), reduction="none"), model(**batch())
        assert losses.shape == (ROWS, LENGTH)
        torch.testing.assert_close(losses.sum(), loss, rtol=1e-12, atol=0)
        assert_close(gradients(model, losses.sum()), gradients(model, loss))


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_losses_of_tokens_follow_all_logits(values: Mapping[str, Any], wraps: bool) -> None:
    """Each in its position, 0 at a mask of 0, and not multiplied by the mask elsewhere."""
    fields = batch()
    fields["loss_mask"] *= 0.25
    with built(values, wraps) as model:
        losses = model(**fields, reduction="none")
        logits = model(fields["input_ids"])
        every = F.cross_entropy(logits.transpose(1, 2), fields["labels"], reduction="none")
        torch.testing.assert_close(
            losses, every * (fields["loss_mask"] > 0), rtol=1e-12, atol=1e-14
        )
        assert not losses[fields["loss_mask"] == 0].any()


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wrapped"])
def test_each_token_has_a_gradient_of_its_own(wraps: bool) -> None:
    """Losses times weights of tokens: what a mask with those weights gives."""
    weights = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(7))
    fields = batch()
    with built({}, wraps) as model:
        got = gradients(model, (model(**fields, reduction="none") * weights).sum())
        fields["loss_mask"] = fields["loss_mask"] * weights
        assert_close(got, gradients(model, model(**fields)))


def test_no_logits_of_masked_tokens_are_computed() -> None:
    """Neither forward nor in the gradients' recomputation."""
    fields, rows = batch(), []

    def matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None:  # only logits have one
            rows.append(len(out))
        return torch.mm(input, mat2, out=out)

    with built({}, False) as model:
        model.loss.matmul = matmul
        gradients(model, model(**fields, reduction="none").sum())
    assert rows == 2 * [int(fields["loss_mask"].sum())]
    assert 0 < rows[0] < ROWS * LENGTH


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wrapped"])
def test_a_batch_without_trained_tokens_has_gradients_of_zero(wraps: bool) -> None:
    """Of all parameters, for data parallelism waits for each."""
    fields = batch()
    fields["loss_mask"].zero_()
    with built({}, wraps) as model:
        losses = model(**fields, reduction="none")
        assert losses.tolist() == [[0.0] * LENGTH] * ROWS
        found = gradients(model, losses.sum())
        assert found.keys() == dict(model.named_parameters()).keys()
        assert not any(gradient.any() for gradient in found.values())


def test_losses_of_tokens_have_no_multi_token_prediction() -> None:
    with built({"model.mtp_num_layers": 1}, False) as model:
        found = gradients(model, model(**batch(), reduction="none").sum())
        assert model.take_mtp_losses() is None
        assert found
        assert not any(name.startswith("mtp.") for name in found)
        trained = gradients(model, model(**batch()))
        assert any(name.startswith("mtp.") for name in trained)


@attrs.frozen
class Losses:
    """Of every token and their sum, with this rank's gradients of each sum."""

    losses: Tensor
    loss: Tensor
    of_losses: dict[str, Tensor]
    of_loss: dict[str, Tensor]


def on_a_rank(values: Mapping[str, Any], wraps: bool) -> Losses:
    with built(values, wraps) as model:
        losses, loss = model(**batch(), reduction="none"), model(**batch())
        of_losses, of_loss = (gradients(model, total) for total in (losses.sum(), loss))
        return Losses(losses.detach(), loss.detach(), of_losses, of_loss)


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("layout", [TP_2, SP], ids=["tp", "sp"])
def test_losses_of_tokens_on_vocabulary_shards(
    gloo_pool: GlooPool, layout: Mapping[str, Any], wraps: bool
) -> None:
    one = on_a_rank({}, wraps)
    for rank in gloo_pool.run(on_a_rank, 2, layout, wraps):
        torch.testing.assert_close(rank.losses, one.losses, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(rank.losses.sum(), rank.loss, rtol=1e-12, atol=0)
        assert_close(rank.of_losses, rank.of_loss)
