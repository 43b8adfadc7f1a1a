"""Documents, conversations and prompts of micro-batches, against the plugins that mark them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.plugin_api import Batch, BatchField
from ascend_run.testing.models import MODELS
from ascend_run.testing.oracle.attention import visible
from ascend_run.testing.oracle.batches import MicroBatch, later, micro_batches
from ascend_run.types.config import RunConfig
from tests.support.small_runs import prepare


def config_of(task: str = "pretrain", **plugins: Any) -> RunConfig:
    config = prepare({**MODELS["dense"], "train.micro_batch_size": 2}).config
    enable = tuple(name for name in plugins if name != "sft")
    return attrs.evolve(config, task=task, enable=enable, plugins=plugins)


def conversations() -> dict[str, Tensor]:
    """Two rows: conversations of 7, 6 and the padding's, and one of 12."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.stack(
        (
            torch.cat((torch.arange(7), torch.arange(6), torch.arange(7))),
            torch.cat((torch.arange(12), torch.arange(8))),
        )
    )
    mask = torch.zeros(2, 20)
    mask[0, 3:5] = mask[0, 9:13] = mask[1, 4:6] = mask[1, 8:12] = 1
    tokens = torch.randint(9, (2, 21), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask,
        "position_ids": positions,
    }


def as_batch(samples: dict[str, Tensor]) -> Iterator[Batch]:
    fields = dict.fromkeys(samples, BatchField(axes=("batch", "sequence")))
    yield Batch(tensors=samples, fields=fields)


def seen_by_ends(batch: Batch) -> Tensor:
    """Which key a query sees, from the ends of documents."""
    length = batch.tensors["tokens"].shape[1]
    rows = batch.row_ends or [batch.document_ends or ()] * len(batch.tensors["tokens"])
    seen = torch.ones(length, length, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
    for row, ends in enumerate(rows):
        for end in ends:
            seen[row, end:, :end] = False
    return seen


def only(config: RunConfig, samples: dict[str, Tensor]) -> MicroBatch:
    (batch,) = micro_batches(config, samples)
    return batch


@pytest.mark.needs_plugins("eod-reset")
@pytest.mark.parametrize("options", [{"eod_token_id": 3}, {"document_length": 6}], ids=str)
def test_documents_are_those_of_eod_reset(options: dict[str, int]) -> None:
    from ascend_run.plugins.sequence.eod_reset import EodResetConfig, documents

    samples, chosen = conversations(), EodResetConfig(**options)
    borders = (
        documents.every(chosen.document_length)
        if chosen.document_length
        else documents.after_token(3)
    )
    (theirs,) = documents.reset(as_batch(samples), borders, chosen)
    ours = only(config_of(**{"eod-reset": chosen}), samples)
    assert torch.equal(visible(ours, None), seen_by_ends(theirs))
    assert torch.equal(ours.positions_BS, theirs.tensors["position_ids"])


@pytest.mark.needs_plugins("sft")
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("prompts", [False, True])
def test_conversations_are_those_of_fine_tuning(multiple: int, prompts: bool) -> None:
    from ascend_run.plugins.tasks.sft import SftConfig, padding

    samples = conversations()
    options = SftConfig(packing=True, bidirectional_prompt=prompts, pad_to_multiple_of=multiple)
    config = config_of("sft", sft=options)
    batches = padding.add_document_ends(padding.shorten(as_batch(samples), config, multiple))
    (theirs,) = padding.show_prompts(batches) if prompts else batches
    ours = only(config, samples)
    expected = theirs.tensors["attention_mask"] if prompts else seen_by_ends(theirs)
    assert torch.equal(visible(ours, None), expected)
    for field, name in (("tokens_BS", "tokens"), ("loss_mask_BS", "loss_mask")):
        assert torch.equal(getattr(ours, field), theirs.tensors[name])


@pytest.mark.needs_plugins("sft")
def test_what_is_later_ends_with_the_document() -> None:
    from ascend_run.plugins.tasks.sft import SftConfig

    config = config_of("sft", sft=SftConfig(packing=True, padding="seq_length"))
    batch = only(config, conversations())
    positions = later(batch.positions_BS, 2, batch)
    assert positions[0].tolist() == [2, 3, 4, 5, 6, 0, 0, 2, 3, 4, 5, 0, 0, 2, 3, 4, 5, 6, 0, 0]
