"""The plugin's errors, what the empty layer slots contain, and which counts exclude them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.core.checkpoint.store import FileStore
from ascend_run.plugin_api import ConfigError, Layout, Numerics, RunConfig
from ascend_run.plugins.pipeline.noop_layers import NoopLayers, NoopLayersConfig
from tests.support.marking import marking_link
from tests.support.probed_runs import Run, built, prepare, probe, train
from tests.support.tiny_configs import model_fields, parallel_fields


def padded(layers: list[int], num_layers: int) -> dict[str, Any]:
    return {
        "enable": ["noop-layers"],
        "model.num_layers": num_layers,
        "plugins.noop-layers.layers": layers,
    }


def problems(layers: tuple[int, ...], num_layers: int = 8, **sizes: int) -> list[str]:
    run = RunConfig(model=model_fields({"num_layers": num_layers}), parallel=parallel_fields())
    plugin = NoopLayers(NoopLayersConfig(layers=layers))
    return list(plugin.ascend_check(config=run, layout=Layout(**sizes)))


def test_it_changes_the_model_and_says_so() -> None:
    assert NoopLayers.manifest.numerics is Numerics.MODEL


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((), "names no layer slot"),
        ((8,), "names 8; expected layer slots 0 to 7"),
        ((-1, 9), "names -1, 9; expected layer slots 0 to 7"),
        ((2, 2), "names 2 twice"),
        (tuple(range(8)), "leaves no layer of model.num_layers=8"),
    ],
)
def test_places_that_cannot_be_are_one_message(layers: tuple[int, ...], told: str) -> None:
    (problem,) = problems(layers)
    assert problem.startswith(f"noop-layers: plugins.noop-layers.layers={list(layers)}")
    assert told in problem


def test_a_pipeline_rank_between_the_ends_keeps_a_layer() -> None:
    assert problems((0, 7), world_size=4, pp=4) == []
    assert problems((0, 1, 6, 7), world_size=4, pp=4) == []  # the ends have the vocabulary
    (problem,) = problems((2, 3), world_size=4, pp=4)
    assert "pipeline rank 1 of 4" in problem
    assert "slots 2, 3" in problem
    # With two chunks each, rank 1 has slots 1 and 5.
    assert problems((1,), world_size=4, pp=4, vpp=2) == []
    assert len(problems((1, 5), world_size=4, pp=4, vpp=2)) == 1


def test_words_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.noop-layers\.layers"):
        prepare(tmp_path, padded(["one"], 4))  # type: ignore[list-item]


def test_what_stands_in_each_place(tmp_path: Path) -> None:
    empty = {0, 4, 7, 8, 9}
    with built(tmp_path, values=padded(sorted(empty), 10)) as (_, context):
        model = context.models["policy"].chunks[0].module
        for place, layer in enumerate(model.decoder.layers):
            assert layer.layer_number == place + 1
            assert bool([*layer.parameters()]) == (place not in empty)
        passing = model.decoder.layers[4]
        hidden, context_kept = torch.randn(4, 1, 32, requires_grad=True), object()
        out, kept = passing(hidden_states=hidden, attention_mask=None, context=context_kept)
        assert torch.equal(out, hidden)
        assert out.data_ptr() != hidden.data_ptr()
        assert kept is context_kept
        out.sum().backward()
        assert torch.equal(hidden.grad, torch.ones_like(hidden))  # type: ignore[arg-type]


def test_no_wrapper_is_called_for_an_empty_slot(tmp_path: Path) -> None:
    marks: list[Any] = []
    hooks = ("ascend_layer", "ascend_self_attention", "ascend_mlp")

    def of(hook: str) -> Any:
        def wrap(self: Any, layer_index: int) -> Any:
            return marking_link(marks, (hook, layer_index))

        return probe(hook, wrap, hook[7:])

    train(tmp_path, *map(of, hooks), values=padded([0, 2], 4))
    assert sorted(marks) == sorted((hook, place) for hook in hooks for place in (1, 3))


def test_expert_readings_are_means_over_the_real_layers(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", model="moe", values={"model.num_layers": 2})
    with_places = train(tmp_path / "padded", model="moe", values=padded([0, 2, 3], 5))
    for name in ("loss", "aux_loss", "expert_load", "grad_norm"):
        assert with_places.readings()[0][name] == plain.readings()[0][name], name


def go_on(folder: Path, steps: int, values: dict[str, Any]) -> Run:
    return train(
        folder,
        values={
            "train.train_iters": steps,
            "checkpoint.save_interval": 1,
            "optimizer.lr_decay_style": "constant",
            **values,
        },
    )


@pytest.mark.parametrize("first", ["plain", "padded"])
def test_checkpoints_have_no_slots_and_load_both_ways(tmp_path: Path, first: str) -> None:
    kinds = {"plain": {"model.num_layers": 2}, "padded": padded([0, 3], 4)}
    (second,) = kinds.keys() - {first}
    go_on(tmp_path / "moved", 2, kinds[first])
    keys = {*FileStore(tmp_path / "moved/run/checkpoints").manifest(2).tensors}
    layers = {key.split("layers.")[1].split(".")[0] for key in keys if "layers." in key}
    assert layers == {"0", "1"}
    moved = go_on(tmp_path / "moved", 4, kinds[second])
    through = go_on(tmp_path / "through", 4, kinds["plain"])
    assert [*moved.weights.values()]
    for weight, expected in zip(moved.weights.values(), through.weights.values(), strict=True):
        assert torch.equal(weight, expected)


def test_a_hugging_face_folder_of_the_real_layers_is_loaded(tmp_path: Path) -> None:
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 90,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    stored = {name: tensor.float() for name, tensor in model.state_dict().items()}
    values = {**padded([1, 2], 4), "model.hf_path": os.fspath(folder), "train.train_iters": 0}
    run = train(tmp_path, values=values)
    for place, layer in ((0, 0), (3, 1)):
        ours = run.weights[f"decoder.layers.{place}.self_attention.linear_proj.weight"]
        assert torch.equal(ours, stored[f"model.layers.{layer}.self_attn.o_proj.weight"])
