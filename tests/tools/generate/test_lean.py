"""Steps of lean layers against those of the modules, for every family, and what is not lean."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ascend_run.ops.generation.lean_layer import StepAngles
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate import recognition
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from ascend_run.tools.generate.recognition import KNOWN_FIELDS, lean_layer
from ascend_run.types.forward import CHAIN, ForwardChain, ForwardLink, LinkPlace, NamedLink
from tests.plugins.models.cases import BY_NAME, FAMILIES
from tests.plugins.models.published import publish
from tests.support.tiny_llama import write_llama

from .test_logits import logits_in_chunks

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*tp_group is None:DeprecationWarning",
    "ignore:.*rope.*:UserWarning",
)

LATENT = {"deepseek_v2", "deepseek_v3", "minicpm3"}
"""Families with multi-latent attention, whose layers stay modules."""
CASES = [(family.name, label) for family in FAMILIES for label in family.variants]


def save(name: str, label: str, folder: Path) -> None:
    family = BY_NAME[name]
    model: Any = family.model(**family.variants[label])
    model.save_pretrained(folder)
    if family.publish:
        publish(folder, family.publish, model.config)


def logits(model: GenerationModel) -> list[Tensor]:
    """Logits of two sequences, in chunks and together."""
    torch.manual_seed(0)
    vocab_size = model.config.model.vocab_size
    sequences = [torch.randint(vocab_size, (length,)).tolist() for length in (15, 8)]
    return logits_in_chunks(model, sequences, 3)


def num_lean(model: GenerationModel, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Tensor]]:
    """Return how many lean layers were computed in a step, and the logits of all steps."""
    calls = 0
    call = recognition.LeanLayer.__call__

    def counted(self: Any, *arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return call(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(recognition.LeanLayer, "__call__", counted)
        found = logits(model)
    return calls, found


@pytest.mark.exhaustive(by=lambda case: (case[0] in LATENT, BY_NAME[case[0]].experts))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case).replace(" ", "_"))
def test_lean_layers_of_a_family_compute_as_its_modules(
    case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(*case, tmp_path)
    options = SourceOptions(family=case[0])
    with loaded_model(tmp_path, options, torch.float64) as model:
        calls, got = num_lean(model, monkeypatch)
        assert (calls > 0) == (case[0] not in LATENT)
        assert len(model._stage.lean.layers) in (0, len(model._stage.chunk.decoder.layers))
        model._stage.lean.layers.clear()
        calls, want = num_lean(model, monkeypatch)
        assert calls == 0
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    with loaded_model(tmp_path, options, torch.float32) as model:
        packed = [
            weight for weight in model._stage.lean.weights.values() if weight.packed is not None
        ]
        assert packed
        assert bool(model._stage.lean.experts.packed) == BY_NAME[case[0]].experts
        torch.testing.assert_close(
            [x.double() for x in logits(model)], want, rtol=1e-3, atol=1e-3, check_dtype=False
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def model(folder: Path) -> Iterator[GenerationModel]:
    with loaded_model(folder, SourceOptions(), torch.float64) as loaded:
        yield loaded


def recognised(model: GenerationModel) -> bool:
    layer = model._stage.chunk.decoder.layers[0]
    return lean_layer(layer, model._stage.lean.weights, StepAngles(False)) is not None


def test_a_layer_of_known_modules_is_recognised(model: GenerationModel) -> None:
    assert recognised(model)


class _Other(nn.Module):
    pass


@pytest.mark.parametrize(
    "path", ["input_layernorm", "self_attention", "self_attention.core_attention", "mlp_bda"]
)
def test_an_unknown_module_is_left_to_the_modules(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    holder, _, name = f"decoder.layers.0.{path}".rpartition(".")
    parent = model._stage.chunk.get_submodule(holder)
    other: Any = _Other() if name != "mlp_bda" else lambda training, fused: None
    monkeypatch.setattr(parent, name, other)
    assert not recognised(model)


@pytest.mark.parametrize("path", ["", "self_attention.linear_proj", "mlp.linear_fc1", "mlp"])
def test_a_link_of_a_plugin_is_not_passed_over(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    module = model._stage.chunk.get_submodule(f"decoder.layers.0.{path}".rstrip("."))
    link = ForwardLink(wrap=lambda inner: inner, compilable=False)
    named = NamedLink(name="of-a-plugin", place=LinkPlace.AROUND, link=link)
    monkeypatch.setattr(module, CHAIN, ForwardChain(module.forward, (named,)), raising=False)
    assert not recognised(model)


def test_a_hook_of_a_module_is_not_passed_over(model: GenerationModel) -> None:
    module = model._stage.chunk.decoder.layers[0].self_attention.linear_qkv
    handle = module.register_forward_hook(lambda module, arguments, out: out)
    try:
        assert not recognised(model)
    finally:
        handle.remove()
    assert recognised(model)


def test_a_field_of_the_config_that_is_off_its_default_is_not_passed_over(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model._stage.chunk.decoder.layers[0].config
    for field in dataclasses.fields(TransformerConfig):
        if field.name in KNOWN_FIELDS or recognition._only_of_experts(field.name):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(config, field.name, object())
            assert not recognised(model), field.name


def test_known_fields_are_fields_of_megatrons_config() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert fields >= KNOWN_FIELDS


def test_a_layer_in_training_or_with_a_mask_is_computed_by_the_modules(
    model: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_lean(*_: Any) -> None:
        raise AssertionError("lean")

    layer = model._stage.chunk.decoder.layers[0]
    monkeypatch.setattr(layer, "training", True)
    assert not recognised(model)
    monkeypatch.setattr(layer, "training", False)
    monkeypatch.setattr(recognition.LeanLayer, "__call__", not_lean)
    with pytest.raises(AssertionError, match="lean"):
        logits(model)
    model._stage.chunk(torch.tensor([[1, 2]]), torch.arange(2)[None])  # no step
    for given in (
        {"attention_mask": torch.ones(1, 2, 2, dtype=torch.bool)},
        {"document_ends": (1,)},
    ):
        step = Step.of([Chunk(sequence=0, start=0, ids=[1, 2], num_logits=1)])
        model.with_cache(16).reserve(0, 2)
        with (
            model._stage.forward.running(step),
            pytest.raises(ValueError, match="neither a bias nor"),
        ):
            model._stage.chunk(torch.tensor([[1, 2]]), torch.arange(2)[None], **given)


def test_lean_layers_in_bfloat16_are_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded_model(folder, SourceOptions(), torch.bfloat16) as model:
        calls, got = num_lean(model, monkeypatch)
        model._stage.lean.layers.clear()
        want = logits(model)
    assert calls > 0
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_weights_are_freed_and_the_tied_one_is_kept(tmp_path: Path) -> None:
    write_llama(tmp_path, tie_word_embeddings=True)
    with loaded_model(tmp_path, SourceOptions(), torch.float32) as model:
        assert model._stage.forward.output is not None
        freed = [weight.plain_NK for weight in model._stage.lean.weights.values()]
        assert len(freed) == 4 * len(model._stage.chunk.decoder.layers)
        assert all(weight.untyped_storage().nbytes() == 4 for weight in freed)
        embedding = model._stage.chunk.embedding.word_embeddings.weight
        assert not embedding.isnan().any()


def test_float64_has_no_message_and_an_unable_machine_has_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ascend_run.ops.linear import packed_linear
    from ascend_run.tools.generate import lean

    for module in (packed_linear, lean):
        monkeypatch.setattr(module, "unavailable", lambda dtype: "no kernel")
    for dtype, count in ((torch.float64, 0), (torch.float32, 1)):
        capsys.readouterr()
        with loaded_model(folder, SourceOptions(), dtype) as model:
            assert all(weight.packed is None for weight in model._stage.lean.weights.values())
            assert not any(x.isnan().any() for x in logits(model))
        printed = capsys.readouterr()
        assert (printed.out + printed.err).count("no kernel") == count
