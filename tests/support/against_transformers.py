"""A family against transformers: logits, every gradient, and the weights that every layout loads.

The mapping of tensors is written out in the family's own tests; nothing of the implementation is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.oracle import training
from ascend_run.testing.oracle.known import unknown
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from tests.support.loaded_model import (
    largest_difference,
    loaded_gradients,
    loaded_weights,
    run_loaded_model,
)
from tests.support.small_runs import prepare

TOLERANCE: Final = 1e-5
"""In float32: the largest error relative to the largest expected value."""
WIDE_TOLERANCE: Final = 1e-10
"""In float64."""
VOCAB: Final = 53
"""Of every reference model; odd, so that padding is noticed."""
VOCABULARY: Final = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")

TENSOR: Final = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
}
STAGES: Final = {"parallel.pipeline_model_parallel_size": 2}
VIRTUAL_STAGES: Final = {**STAGES, "parallel.virtual_pipeline_model_parallel_size": 2}
EXPERTS: Final = {"parallel.expert_model_parallel_size": 2}
EXPERT_TENSOR: Final = {"parallel.expert_tensor_parallel_size": 2}

Tensors = dict[str, Tensor]


@attrs.frozen
class Reference:
    """A saved random transformers model, and the results of one forward and backward.

    Args:
        in_our_layout: Converts its tensors, by name, and its config to ascend-run's names.
    """

    family: str
    model: nn.Module
    folder: Path
    in_our_layout: Callable[[Tensors, Any], Tensors]
    tokens: Tensor = attrs.field(init=False)
    """[B, S] int64."""
    labels: Tensor = attrs.field(init=False)
    logits: Tensor = attrs.field(init=False)
    loss: Tensor = attrs.field(init=False)
    """Sum over all tokens."""
    gradients: Tensors = attrs.field(init=False)
    """By ascend-run's names."""

    def __attrs_post_init__(self) -> None:
        self.model.save_pretrained(self.folder)
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(VOCAB, (2, 17), generator=generator)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        with computing_in(next(self.model.parameters()).dtype):
            logits = self.model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
        assert logits.abs().max() > 1, "logits of a size that counts"
        theirs = {name: p.grad for name, p in self.model.named_parameters()}
        for name, value in (
            ("tokens", tokens),
            ("labels", labels),
            ("logits", logits.detach()),
            ("loss", loss.detach()),
            ("gradients", self.in_our_layout(theirs, self.model.config)),
        ):
            object.__setattr__(self, name, value)

    @property
    def weights(self) -> Tensors:
        """Return the weights and saved buffers by ascend-run's names."""
        theirs = {name: p.detach() for name, p in self.model.state_dict().items()}
        return self.in_our_layout(theirs, self.model.config)


def check_one_rank(
    reference: Reference,
    pool: GlooPool,
    overrides: Sequence[str] = (),
    tolerance: float = TOLERANCE,
) -> None:
    """Compare logits, loss and every gradient in the dtype of the reference."""
    (ours,) = pool.run(
        run_loaded_model,
        1,
        reference.family,
        str(reference.folder),
        reference.tokens,
        reference.labels,
        overrides,
        reference.logits.dtype,
    )
    assert largest_difference(ours.logits_BSV, reference.logits) < tolerance
    assert largest_difference(ours.loss, reference.loss) < tolerance
    assert_gradients(ours.gradients, reference.gradients, tolerance)


def check_oracle(reference: Reference, values: Mapping[str, Any]) -> None:
    """Compare loss and every gradient of the oracle, which shares no code with a run.

    Args:
        reference: In float64.
        values: Config keys.
    """
    config = prepare({**_values_of(reference), **values}).config
    assert [*unknown(config)] == []
    places = torch.arange(reference.tokens.shape[1]).expand_as(reference.tokens)
    samples = {
        "tokens": reference.tokens,
        "labels": reference.labels,
        "loss_mask": torch.ones_like(reference.labels),
        "position_ids": places,
    }
    found = training.gradients(config, reference.weights, samples)
    assert abs(found.loss * found.tokens / reference.loss - 1) < WIDE_TOLERANCE
    assert found.gradients.keys() == reference.gradients.keys()
    for name, gradient in found.gradients.items():
        assert gradient is not None, name
        got = gradient * found.tokens
        assert largest_difference(got, reference.gradients[name]) < WIDE_TOLERANCE, name


def check_layouts(
    reference: Reference,
    pool: GlooPool,
    layouts: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]],
    values: Mapping[str, Any],
) -> None:
    """Compare the mean loss and every gradient of two ranks, as a training step computes them.

    Args:
        reference: In float64.
        layouts: Name -> the plugins and the config keys of a layout of two ranks.
        values: Config keys of every layout.
    """
    count = reference.labels.numel()
    given = {**_values_of(reference), **values}
    ranks = pool.run(
        loaded_gradients,
        2,
        [({**given, **layout}, plugins) for plugins, layout in layouts.values()],
        reference.tokens,
        reference.labels,
        timeout=120.0,
    )
    for name, outcomes in zip(layouts, zip(*ranks, strict=True), strict=True):
        for outcome in outcomes:
            assert abs(outcome.losses[0] * count / reference.loss - 1) < WIDE_TOLERANCE, name
        whole = full_tensors(outcomes)
        assert whole.problems(WIDE_TOLERANCE) == [], name
        got = {key: gradient * count for key, gradient in whole.tensors.items()}
        assert_gradients(got, reference.gradients, WIDE_TOLERANCE)


def _values_of(reference: Reference) -> dict[str, Any]:
    """Return the config keys of a run of the reference's global batch, one row at a time."""
    return {
        "model.family": reference.family,
        "model.hf_path": str(reference.folder),
        "model.make_vocab_size_divisible_by": 2,
        "data.seq_length": reference.tokens.shape[1],
        "train.micro_batch_size": 1,
        "train.global_batch_size": len(reference.tokens),
        "train.precision": "fp32",
    }


def assert_gradients(
    ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    assert ours.keys() == expected.keys()
    for name, want in expected.items():
        got = ours[name]
        if name.endswith(VOCABULARY):
            assert not got[VOCAB:].any(), "rows that pad the vocabulary get no gradient"
            got = got[:VOCAB]
        assert largest_difference(got, want) < tolerance, name


def check_loaded_weights(
    reference: Reference, pool: GlooPool, world_size: int, layout: Mapping[str, Any]
) -> None:
    """Check that every weight of every rank is bitwise transformers', and none is missing."""
    values = {
        "model.family": reference.family,
        "model.hf_path": str(reference.folder),
        "model.make_vocab_size_divisible_by": 8,
        "data.seq_length": 16,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 4,
        "train.precision": "fp32",
        **layout,
    }
    whole = full_tensors(pool.run(loaded_weights, world_size, values))
    assert whole.problems() == []
    expected = {f"model/{name}": weight for name, weight in reference.weights.items()}
    assert whole.tensors.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(whole.tensors[name][: len(weight)], weight), name
