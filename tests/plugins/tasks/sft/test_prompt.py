"""Prompts with bidirectional attention: the mask, the layouts, and incompatible plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from ascend_run.plugin_api import AscendRunError, AttentionFeatures, Batch
from ascend_run.plugins.tasks.sft import Sft, SftConfig
from ascend_run.plugins.tasks.sft.padding import show_prompts
from ascend_run.registry.discovery import discover
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.costs import planned
from tests.support.latent_models import LATENT
from tests.support.needed_plugins import case
from tests.support.small_runs import prepare

from .test_samples import chat

OPTION = "plugins.sft.bidirectional_prompt"


def test_prompt_tokens_attend_to_each_other_and_no_other_conversation() -> None:
    """A row of two conversations and padding, and a row of one."""
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
    counted = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1, 0, 0]])
    tensors = {"position_ids": position_ids, "loss_mask": counted.float()}
    (batch,) = show_prompts(iter([Batch(tensors=tensors, fields={})]))
    allowed = batch.tensors["attention_mask"]
    assert allowed.dtype is torch.bool
    # The tokens of each prompt; the last one predicts the first trained token.
    prompts = [[range(2), range(4, 7)], [range(3)]]
    conversations = [[range(4), range(4, 8)], [range(8)]]
    for row in range(2):
        for query in range(8):
            for key in range(8):
                same = any(query in one and key in one for one in conversations[row])
                prompt = any(query in one and key in one for one in prompts[row])
                assert bool(allowed[row, query, key]) == (same and (prompt or key <= query))


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("prompt")
    return {
        "task": "sft",
        "model.vocab_size": 1000,
        "data.train": [write_lines(folder / "train.jsonl", [chat("one")])],
        "data.tokenizer": str(write_tokenizer(folder / "tokenizer", CHATML)),
        OPTION: True,
    }


LAYOUTS = [
    case((), {"tp": 2, "pp": 2}, {"model.recompute_granularity": "selective"}),
    case(("ring-attention",), {"cp": 2}, {}),
    case(("ulysses", "swap-attention"), {"cp": 2}, {"plugins.swap-attention.min_bytes": 1}),
    case((), {"pp": 2, "vpp": 2}, {"model.num_layers": 4, "plugins.sft.packing": True}),
    case(("ring-attention",), {"cp": 2, "tp": 2}, LATENT, id="latent attention"),
]


@pytest.mark.exhaustive(by=lambda beside: ["beside"] if beside else [])
@pytest.mark.parametrize(("beside", "layout", "more"), LAYOUTS, ids=str)
def test_every_layout_computes_what_one_rank_does(
    parity: Parity,
    values: dict[str, Any],
    beside: tuple[str, ...],
    layout: dict[str, int],
    more: dict[str, Any],
) -> None:
    """Rows with prompts of different lengths, the longest of eight tokens."""
    rows = {"train.micro_batch_size": 4, "train.global_batch_size": 8}
    options = {name: value for name, value in more.items() if name.startswith("plugins.")}
    config = {name: value for name, value in more.items() if name not in options}
    given = {"config": {**values, **rows, **config}, "options": options}
    parity((), beside=beside, layout=layout, model="moe" if more is LATENT else "dense", **given)


def test_a_plan_counts_the_pairs_that_a_causal_mask_would_leave_out(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run = {**DENSE, **values, "run.output_dir": str(tmp_path)}
    _, (cost,) = planned(run, (), 1)
    change, length = cost.changes["sft"], DENSE["data.seq_length"]
    # Two layers and four samples a step; 8 D + 6 D of 8 heads of 4, twice.
    assert change.flops == 2 * 4 * 8 * 2 * 7 * 4 * length * (length - 1) / 2
    assert change.buffers == {"attention mask": length**2 * (1 + 4)}
    two = {**run, "train.micro_batch_size": 2}
    for packing, numbers in ((False, 2 * length**2), (True, (2 * length) ** 2)):
        _, (cost,) = planned({**two, "plugins.sft.packing": packing}, (), 1)
        assert cost.changes["sft"].buffers == {"attention mask": numbers * (1 + 4)}


@pytest.mark.needs_plugins("ulysses")
def test_an_attention_that_takes_no_such_mask_is_refused_when_planned(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {**DENSE, **values, "run.output_dir": str(tmp_path), "parallel.context_parallel_size": 2}
    ulysses: Any = discover().load(["ulysses"])["ulysses"]
    without_bias = attrs.evolve(ulysses.manifest, attention=AttentionFeatures.all_but("bias"))
    monkeypatch.setattr(ulysses, "manifest", without_bias)
    with pytest.raises(AscendRunError, match="'ulysses' does not do 'bias', which 'sft' needs"):
        prepare(run, ("ulysses",), 2)
    prepare({**run, OPTION: False}, ("ulysses",), 2)
    with pytest.raises(AscendRunError, match=r"does not go with model.window_size=\(?\[?4"):
        prepare({**run, "model.window_size": [4, 0]}, ("ulysses",), 2)
    assert not Sft(SftConfig()).manifest.attention_needs.names()
