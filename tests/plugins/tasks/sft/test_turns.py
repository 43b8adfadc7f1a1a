"""Ten steps against transformers and torch, for each choice of what is trained; the loss and every
gradient in float64; and what does not go together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaForCausalLM

from ascend_run.plugin_api import ConfigError
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.support.chats import CHATML, GENERATION, write_lines, write_tokenizer
from tests.support.small_runs import prepare, standing_rank
from tests.support.task_runs import BATCH, STEPS, batches_of
from tests.support.tiny_llama import adamw, write_llama

from .test_training import conversations, values

WEIGHTS = (0.25, 2, 1, 0, 0.5, None, 1)
KINDS: dict[str, dict[str, Any]] = {
    "train_on_inputs": {"plugins__sft__train_on_inputs": True},
    "mask_history": {"plugins__sft__mask_history": True},
    "weights": {},
    "weights and inputs": {"plugins__sft__train_on_inputs": True},
}


def weighted(count: int) -> list[dict[str, Any]]:
    """Return conversations whose turns have weights, with one above 0 in each."""
    made, number = conversations(count), 0
    for conversation in made:
        for message in conversation["messages"][1::2]:
            weight = WEIGHTS[number % len(WEIGHTS)]
            number += 1
            if weight is not None:
                message["weight"] = weight
        last = conversation["messages"][-1]
        last["weight"] = last.get("weight", 1) or 1.5
    return made


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    write_llama(folder / "model", max_position_embeddings=448)
    write_tokenizer(folder / "tokenizer", CHATML)
    write_tokenizer(folder / "blocks", GENERATION)
    write_lines(folder / "plain.jsonl", conversations(STEPS * BATCH))
    write_lines(folder / "weights.jsonl", weighted(STEPS * BATCH))
    write_lines(folder / "held-out.jsonl", conversations(7))
    return folder


def file_of(workplace: Path, kind: str) -> Path:
    return workplace / ("weights.jsonl" if "weights" in kind else "plain.jsonl")


def run_values(workplace: Path, output: Path, kind: str, **changes: Any) -> Mapping[str, Any]:
    return {
        **values(workplace, output, **{**KINDS[kind], **changes}),
        "data.train": [str(file_of(workplace, kind))],
    }


def samples(workplace: Path, kind: str) -> list[tuple[Tensor, Tensor]]:
    """Return the ids of each conversation, and the weights of their losses."""
    tokenizer, found = AutoTokenizer.from_pretrained(workplace / "blocks"), []
    for line in file_of(workplace, kind).read_text().splitlines():
        messages = json.loads(line)["messages"]
        made = tokenizer.apply_chat_template(
            [{k: m[k] for k in ("role", "content")} for m in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = torch.tensor(made["assistant_masks"])
        turn_T = (mask.diff(prepend=torch.zeros(1, dtype=mask.dtype)) > 0).cumsum(0)
        of_turns = [m.get("weight", 1.0) for m in messages[1::2]]
        if kind == "mask_history":
            of_turns = [0.0] * (len(of_turns) - 1) + [1.0]
        weight_T = torch.tensor([0.0, *of_turns])[turn_T] * mask
        if "inputs" in kind:
            weight_T = torch.where(mask > 0, weight_T, 1.0)
        found.append((torch.tensor(made["input_ids"]), weight_T))
    return found


def loss_of(model: nn.Module, batch: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the weighted sum of losses over the number of tokens with a weight."""
    total, count = torch.zeros((), dtype=model.dtype), 0
    for ids, weight_T in batch:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        each = -torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
        total = total + (each * weight_T[1:]).sum()
        count += int((weight_T[1:] > 0).sum())
    return total / count


def steps(workplace: Path, kind: str) -> Iterator[tuple[float, float]]:
    """Yield loss and gradient norm of AdamW steps of transformers' model."""
    model = LlamaForCausalLM.from_pretrained(workplace / "model")
    optimizer, data = adamw([*model.parameters()]), samples(workplace, kind)
    for batch in batches_of(data):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach()), float(norm)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_those_of_transformers(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path, kind: str
) -> None:
    run = run_values(workplace, tmp_path / "run", kind, train__micro_batch_size=2)
    (ended,) = gloo_pool.run(whole_run, 1, run, timeout=100)
    found = [(line["loss"], line["grad_norm"]) for line in ended.readings if "loss" in line]
    for ours, theirs in zip(found, steps(workplace, kind), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_formula(
    workplace: Path, tmp_path: Path, kind: str, packing: bool
) -> None:
    from ascend_run.testing.dry_run import DryRun, gradient_of

    changes = {"plugins__sft__packing": True, "data__seq_length": 448} if packing else {}
    run = run_values(workplace, tmp_path / "run", kind, **changes)
    rows = 1 if packing else BATCH
    run = {**run, "train.global_batch_size": rows, "train.eval_interval": 0}
    first = tmp_path / "first.jsonl"
    first.write_text("".join(file_of(workplace, kind).read_text().splitlines(True)[:BATCH]))
    with standing_rank({**run, "data.train": [str(first)]}) as (hooks, context):
        dry_run = DryRun(hooks, context)
        step = dry_run.for_gradients(torch.float64)
        dry_run.load_weights()
        totals = step(dry_run.batches(dry_run.task_samples(rows)), rows)
        found = {one.name: one.tensor for one in dry_run.shards(gradient_of)}
    single = LlamaForCausalLM.from_pretrained(workplace / "model")
    with computing_in(torch.float64):
        model = LlamaForCausalLM(single.config)
        model.load_state_dict(single.state_dict())
        loss = loss_of(model, samples(workplace, kind)[:BATCH])
        loss.backward()
    assert totals.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    pairs = {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight,
        "decoder.final_layernorm.weight": model.model.norm.weight,
        "output_layer.weight": model.lm_head.weight,
        "decoder.layers.1.mlp.linear_fc2.weight": model.model.layers[1].mlp.down_proj.weight,
        "decoder.layers.0.self_attention.linear_proj.weight": (
            model.model.layers[0].self_attn.o_proj.weight
        ),
    }
    for name, parameter in pairs.items():
        gradient = found[name]
        assert gradient is not None
        assert parameter.grad is not None
        error = (gradient[: len(parameter)] - parameter.grad).abs().max()
        assert float(error / parameter.grad.abs().max()) < 1e-10, name


@pytest.mark.parametrize(
    "other", ["mask_history=true", "too_long=turns", "bidirectional_prompt=true"]
)
def test_what_does_not_go_with_inputs_is_named(workplace: Path, tmp_path: Path, other: str) -> None:
    name, _, value = other.partition("=")
    run = run_values(workplace, tmp_path / "run", "train_on_inputs")
    given = True if value == "true" else value
    with pytest.raises(ConfigError) as error:
        prepare({**run, f"plugins.sft.{name}": given}, (), 1)
    (problem,) = error.value.problems
    assert problem.startswith("sft: plugins.sft.train_on_inputs=true trains every token, and ")
    assert f"plugins.sft.{other} " in problem
    assert problem.endswith("; leave out one of the two")
