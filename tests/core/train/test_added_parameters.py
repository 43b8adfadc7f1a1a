"""A parameter that a plugin adds to a model, and checkpoints that hold less than the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ascend_run.plugin_api import CheckpointError, ForwardLink, LinkPlace
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import Run, train
from tests.support.tiny_llama import write_llama


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The conformance kit's model as a Hugging Face folder."""
    return write_llama(tmp_path / "base", 90, num_attention_heads=8)


def run(folder: Path, base: str, steps: int, seen: list[Any], *, marked: bool = True) -> Run:
    """Train with a plugin that adds a parameter to every output projection, and checkpoints that
    hold nothing else of the model."""

    def add(self: Any, name: str) -> Any:
        def wrap(linear: nn.Module) -> ForwardLink:
            linear.extra = nn.Parameter(torch.full((3,), 2.0))
            if marked:
                linear.extra.ascend_added_by = "adder"

            def added(inner: Any) -> Any:
                def forward(*args: Any) -> Any:
                    out, bias = inner(*args)
                    return out + linear.extra.sum(), bias

                return forward

            return ForwardLink(wrap=added, compilable=False)

        return wrap if name.endswith("linear_proj") else None

    def keep(self: Any) -> Any:
        return lambda shards: [shard for shard in shards if shard.key.endswith(".extra")]

    def look(self: Any, context: Any) -> None:
        (chunk,) = context.models["policy"].chunks
        seen.append({name: p.detach().clone() for name, p in chunk.module.named_parameters()})

    adder = plugin(
        "adder",
        {
            "ascend_linear": add,
            "ascend_checkpoint_filter": keep,
            "ascend_before_run": look,
        },
        forward_links={"linear": LinkPlace.AROUND},
    )()
    values = {
        "model.hf_path": base,
        "train.train_iters": steps,
        "checkpoint.save_interval": 1,
        "optimizer.lr_decay_style": "constant",
    }
    return train(folder, adder, values=values)


def test_it_keeps_its_value_where_weights_come_from_a_hugging_face_folder(
    tmp_path: Path, base: str
) -> None:
    seen: list[Any] = []
    run(tmp_path, base, 1, seen)
    stored = load_file(Path(base) / "model.safetensors")
    assert torch.equal(seen[0]["embedding.word_embeddings.weight"][:90],
                       stored["model.embed_tokens.weight"])  # fmt: skip
    extra = [tensor for name, tensor in seen[0].items() if name.endswith(".extra")]
    assert [tensor.tolist() for tensor in extra] == [[2.0] * 3] * 2


def test_without_its_mark_the_folder_is_said_not_to_have_it(tmp_path: Path, base: str) -> None:
    with pytest.raises(CheckpointError, match="extra has no Hugging Face tensor"):
        run(tmp_path, base, 1, [], marked=False)


def test_what_checkpoints_leave_out_comes_from_the_folder_again(tmp_path: Path, base: str) -> None:
    seen: list[Any] = []
    first = run(tmp_path, base, 1, seen)
    run(tmp_path, base, 2, seen)
    stored = load_file(Path(base) / "model.safetensors")
    for name, weight in seen[1].items():
        if name.endswith(".extra"):
            assert torch.equal(weight, first.weights[name])
            assert not torch.equal(weight, seen[0][name])
        else:
            assert torch.equal(weight, seen[0][name]), name
    assert torch.equal(seen[1]["embedding.word_embeddings.weight"][:90],
                       stored["model.embed_tokens.weight"])  # fmt: skip
