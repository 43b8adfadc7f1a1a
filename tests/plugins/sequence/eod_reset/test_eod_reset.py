"""Documents of one sequence: their joint result is the sum of each document's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.core.run import prepared_rank
from ascend_run.core.train.seeding import seed_everything
from ascend_run.plugin_api import AscendRunError, Batch, BatchField, DataError
from ascend_run.plugins.sequence.eod_reset import EodReset, EodResetConfig
from ascend_run.plugins.sequence.eod_reset.documents import ends, positions
from ascend_run.testing.dry_run import DryRun, gradient_of
from ascend_run.testing.parity import Parity
from tests.support.needed_plugins import case
from tests.support.probed_runs import prepare, request

EOD = 1
TOKENS = [5, 8, 7, EOD, EOD, 7, 9, 11, 3, 4, 6, 2, EOD, 9, EOD, 12]
ENDS = (4, 5, 13, 15, 16)
"""Document ends of TOKENS; the second document is only its end token, the last continues elsewhere.
Their lengths are powers of two, so that dividing a mean is exact."""
OTHER_TOKENS = [3, EOD, 9, EOD, 8, 6, 5, EOD, 4, 7, 10, 2, 13, 5, 3, 8]
OTHER_ENDS = (2, 4, 8, 16)
"""Of another row of a micro-batch."""
ON: dict[str, Any] = {
    "enable": ["eod-reset"],
    "plugins.eod-reset.eod_token_id": EOD,
    "model.attention_dropout": 0.0,
    "model.hidden_dropout": 0.0,
}

documents = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@settings(deadline=None)
@given(documents)
def test_documents_end_behind_their_last_token(tokens: list[int]) -> None:
    found = ends(torch.tensor(tokens), EOD)
    assert found[-1] == len(tokens)
    assert [*found] == sorted({*found})
    want = [i + 1 for i, token in enumerate(tokens) if token == EOD]
    assert [*found] == sorted({*want, len(tokens)})


@settings(deadline=None)
@given(st.lists(documents.map(lambda row: (row * 30)[:30]), min_size=1, max_size=3))
def test_positions_count_from_the_beginning_of_a_document(rows: list[list[int]]) -> None:
    want = []
    for row in rows:
        count, line = 0, []
        for token in row:
            line.append(count)
            count = 0 if token == EOD else count + 1
        want.append(line)
    assert positions(torch.tensor(rows), EOD).tolist() == want


def sample(tokens: list[int], labels: list[int]) -> dict[str, Tensor]:
    """Build a sample in which every label counts, that of a document's last token too."""
    return {
        "tokens": torch.tensor(tokens),
        "labels": torch.tensor(labels),
        "loss_mask": torch.ones(len(tokens)),
        "position_ids": torch.arange(len(tokens)),
    }


def gradients(
    folder: Path, data: dict[str, Tensor], values: Mapping[str, Any], *more: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Return the sum of the losses of a micro-batch in float64, and every gradient of it."""
    rows = 1 + len(more)
    length = len(data["tokens"]) * rows
    given = {
        "data.seq_length": len(data["tokens"]),
        "train.micro_batch_size": rows,
        "train.global_batch_size": rows,
        "model.max_position_embeddings": len(TOKENS),
        "model.attention_dropout": 0.0,
        "model.hidden_dropout": 0.0,
        **values,
    }
    with (
        warnings.catch_warnings(),
        prepared_rank(request(prepare(folder, given))) as (hooks, context),
    ):
        warnings.simplefilter("ignore")  # Megatron's own warnings
        seed_everything(context.config, context.layout)
        dry_run = DryRun(hooks, context)
        forward_backward = dry_run.for_gradients(torch.float64)
        totals = dry_run.gradients(forward_backward, dry_run.batches([data, *more]))
        assert totals.num_tokens == length
        found = {p.name: p.tensor.detach().clone() for p in dry_run.shards(gradient_of)}
    return totals.loss * length, {name: gradient * length for name, gradient in found.items()}


@pytest.mark.exhaustive(by=lambda values: ["model.position_embedding_type" in values])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model.position_embedding_type": "learned_absolute"},
        {
            "model.window_size": [2, 0],
            "model.rope_scaling_type": "dynamic",
            "model.rope_scaling_factor": 4.0,
        },
        {"model.recompute_granularity": "selective"},
    ],
    ids=["rotary", "learned positions", "window and stretched positions", "recomputed"],
)
def test_a_micro_batch_is_the_sum_of_its_documents(tmp_path: Path, values: dict[str, Any]) -> None:
    """Rows with different document ends, no longer than the model's maximum length."""
    rows = [sample(row, [*row[1:], 3]) for row in (TOKENS, OTHER_TOKENS)]
    loss, found = gradients(tmp_path / "all", rows[0], {**ON, **values}, rows[1])
    total, sums = 0.0, {name: torch.zeros_like(g) for name, g in found.items()}
    for row, ends_of_row in zip(rows, (ENDS, OTHER_ENDS), strict=True):
        for begin, end in pairwise((0, *ends_of_row)):
            tokens, labels = (row[name][begin:end].tolist() for name in ("tokens", "labels"))
            folder = tmp_path / f"{row['tokens'][0]}-{begin}"
            alone, shards = gradients(folder, sample(tokens, labels), values)
            total += alone
            for name, gradient in shards.items():
                sums[name] += gradient
    assert loss == pytest.approx(total, rel=1e-10)
    for name, want in sums.items():
        difference = (found[name] - want).abs().max() / want.abs().max()
        assert difference < 1e-10, name
    plain, _ = gradients(tmp_path / "plain", rows[0], values, rows[1])
    assert abs(plain - loss) > 1e-3 * abs(loss), "together they would have been another"


LAYOUTS = [
    case((), {"tp": 2}),
    case((), {"pp": 4}),  # two stages see neither tokens nor labels
    case((), {"pp": 2, "vpp": 2}),
    case((), {"dp": 2}),
    case(("unaligned-ulysses",), {"cp": 3}),  # which divides neither a row nor both
    case(("ulysses",), {"cp": 2, "pp": 2}),
    case(("ring-attention", "swap-attention"), {"cp": 2}),
    case(("ring-attention",), {"cp": 4}),
]


@pytest.mark.exhaustive(by=lambda beside, layout: [bool(beside), "pp" in layout])
@pytest.mark.parametrize(("beside", "layout"), LAYOUTS, ids=str)
def test_every_layout_computes_what_one_rank_does(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int]
) -> None:
    """The vocabulary is small, so that documents end in every sample; two rows a micro-batch."""
    parity(
        "eod-reset",
        beside=beside,
        layout=layout,
        config={
            "model.vocab_size": 6,
            "model.num_layers": 4 if "pp" in layout else 2,
            "train.micro_batch_size": 2,
        },
        options={"plugins.eod-reset.eod_token_id": EOD, "plugins.swap-attention.min_bytes": 1},
    )


def test_documents_of_a_fixed_length_end_alike_in_every_row(parity: Parity) -> None:
    """So rows are kept, and no end-of-document token is required."""
    fields = {"tokens": BatchField(axes=("batch", "sequence"))}
    rows = torch.tensor([TOKENS, TOKENS[::-1]])

    def no_token() -> int:
        raise AssertionError("nobody needs it")

    wrap = EodReset(EodResetConfig(document_length=5)).ascend_batch(end_of_document=no_token)
    (batch,) = wrap(iter([Batch(tensors={"tokens": rows}, fields=fields)]))
    assert batch.document_ends == (5, 10, 15, 16)
    assert batch.tensors["position_ids"].tolist() == [[i % 5 for i in range(16)]] * 2
    parity(
        "eod-reset",
        layout={"tp": 2},
        config={"train.micro_batch_size": 2},
        options={"plugins.eod-reset.document_length": 5},
    )


def test_a_sequence_of_fixed_documents_is_the_sum_of_them(tmp_path: Path) -> None:
    labels = [*TOKENS[1:], 3]
    fixed = {"enable": ["eod-reset"], "plugins.eod-reset.document_length": 8}
    none = {"model.attention_dropout": 0.0, "model.hidden_dropout": 0.0}
    whole, found = gradients(tmp_path / "all", sample(TOKENS, labels), fixed | none)
    halves = [
        gradients(tmp_path / str(i), sample(TOKENS[i : i + 8], labels[i : i + 8]), none)
        for i in (0, 8)
    ]
    assert whole == pytest.approx(sum(loss for loss, _ in halves), rel=1e-10)
    for name, gradient in found.items():
        want = halves[0][1][name] + halves[1][1][name]
        assert (gradient - want).abs().max() <= 1e-10 * want.abs().max(), name


def test_positions_alone_can_be_reset(tmp_path: Path) -> None:
    values = {**ON, "model.position_embedding_type": "learned_absolute"}
    only = {**values, "plugins.eod-reset.reset_attention_mask": False}
    data = sample(TOKENS, [*TOKENS[1:], 3])
    both, _ = gradients(tmp_path / "both", data, values)
    alone, _ = gradients(tmp_path / "alone", data, only)
    plain, _ = gradients(
        tmp_path / "plain", data, {"model.position_embedding_type": "learned_absolute"}
    )
    assert len({round(loss, 6) for loss in (both, alone, plain)}) == 3


def test_a_batch_says_where_the_documents_of_each_row_end() -> None:
    fields = {"tokens": BatchField(axes=("batch", "sequence"))}

    def batches() -> Iterator[Batch]:
        yield Batch(tensors={"tokens": torch.tensor([TOKENS, OTHER_TOKENS])}, fields=fields)

    wrap = EodReset(EodResetConfig()).ascend_batch(end_of_document=lambda: EOD)
    (batch,) = wrap(batches())
    assert batch.row_ends == (ENDS, OTHER_ENDS)
    assert batch.tensors["position_ids"][0, :6].tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plugins.eod-reset.eod_token_id": 90}, "eod_token_id=90 is not a token id"),
        ({"plugins.eod-reset.document_length": 5}, "leave out plugins.eod-reset.eod_token_id=1"),
        ({"plugins.eod-reset.document_length": 99}, "document_length=99 leaves every sequence"),
        (
            {
                "plugins.eod-reset.reset_attention_mask": False,
                "plugins.eod-reset.reset_position_ids": False,
            },
            "both false, so it changes nothing",
        ),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_when_planned(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(AscendRunError, match=message):
        prepare(tmp_path, {**ON, "train.global_batch_size": 2, **values})


@pytest.mark.needs_plugins("dpo")
def test_beside_a_task_that_keeps_documents_apart_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AscendRunError, match="'dpo' and 'eod-reset' both claim 'documents'"):
        prepare(tmp_path, {**ON, "task": "dpo"})


def test_data_without_an_end_of_document_token_is_reported(tmp_path: Path) -> None:
    with prepared_rank(request(prepare(tmp_path, {"enable": ["eod-reset"]}))) as (hooks, context):
        seed_everything(context.config, context.layout)
        dry_run = DryRun(hooks, context)
        dry_run.for_gradients(torch.float64)
        data = sample(TOKENS, TOKENS)
        with pytest.raises(DataError, match="no end-of-document token is known"):
            next(dry_run.batches([data]))
