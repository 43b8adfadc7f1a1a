"""Every task with every family: its loss and each gradient against the formula of transformers'
logits, in float64; of samples in rows of their own and packed, and in layouts of two ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor, nn

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from tests.plugins.models.cases import CASES, FAMILIES, Family
from tests.plugins.models.published import publish
from tests.support.against_transformers import EXPERTS, STAGES, TENSOR, WIDE_TOLERANCE
from tests.support.family_tasks import (
    TASKS,
    PlainTask,
    TaskOutcome,
    task_gradients,
    task_values,
    write_samples,
)
from tests.support.loaded_model import largest_difference

VOCABULARY: Final = 401
"""Of the tokenizer, and more; odd, so that it is padded."""
_ORIGINAL: Final = {"original_max_position_embeddings": 128}


def for_rows(family: Family, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model for which packed rows, of 128 tokens, are not too long; most
    models have 64 positions."""
    if family.name == "gpt2":
        return {**changes, "n_positions": 128}
    rope = changes.get("rope_parameters", {})
    if rope.get("rope_type") != "longrope":
        return dict(changes)
    own = _ORIGINAL if changes.keys() & _ORIGINAL.keys() else {}
    scaled = {"max_position_embeddings": 512, "rope_parameters": {**rope, **_ORIGINAL}}
    return {**changes, **own, **scaled}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"))


def write_model(
    family: Family, changes: Mapping[str, Any], folder: Path, noise: float = 0.0
) -> nn.Module:
    """Write a random model in float64 as a folder of its family.

    Args:
        noise: Standard deviation of what is added to the weights that every such model has.
    """
    model = family.model(torch.float64, **{**for_rows(family, changes), "vocab_size": VOCABULARY})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
            parameter.copy_(parameter.float())
    model.save_pretrained(folder)
    if family.publish:
        publish(folder, family.publish, model.config)
    return model


def expected(family: Family, plain: PlainTask) -> dict[str, Tensor]:
    """Return the gradients by ascend-run's names; those of a model without its output layer if
    there is a score head."""
    named = dict(plain.model.named_parameters())
    theirs = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    found = family.in_our_layout(theirs, plain.model.config)
    if plain.score_KH is None:
        return found
    assert plain.score_KH.grad is not None
    kept = {name: x for name, x in found.items() if not name.startswith("output_layer.")}
    return {**kept, "score.weight": plain.score_KH.grad}


Layout = tuple[int, dict[str, Any], tuple[str, ...]]
"""Number of ranks, config values and plugins."""


@attrs.frozen
class Models:
    """A random policy and reference of a family, of transformers and in folders."""

    family: Family
    samples: Path
    folder: Path
    policy: nn.Module
    reference: nn.Module

    @classmethod
    def of(cls, case: str, samples: Path, folder: Path) -> Models:
        family, changes = CASES[case]
        policy = write_model(family, changes, folder / "model")
        other = write_model(family, changes, folder / "other", noise=0.05)
        return cls(family, samples, folder, policy, other)

    def check(self, pool: GlooPool, task: str, runs: Mapping[str, Layout]) -> None:
        """Compare loss and gradients of each run with the formula."""
        values = {
            **self.family.values,
            "model.hf_path": str(self.folder / "model"),
            "model.family": self.family.name,
            "model.make_vocab_size_divisible_by": 2,
        }
        if task == "dpo":
            values["plugins.dpo.reference"] = str(self.folder / "other")
        ranks = {number for number, _, _ in runs.values()}
        given = [({**values, **changes}, plugins) for _, changes, plugins in runs.values()]
        found = pool.run(task_gradients, ranks.pop(), given, timeout=100)
        heads = [one.score_KH for one in found[-1] if one.score_KH is not None]
        plain = PlainTask(
            folder=self.samples,
            model=self.policy,
            reference=self.reference,
            score_KH=heads[0].double().requires_grad_() if heads else None,
        )
        loss = plain.backward(task)
        wanted = expected(self.family, plain)
        for name, outcomes in zip(runs, zip(*found, strict=True), strict=True):
            for outcome in outcomes:
                assert abs(outcome.loss / loss - 1) < WIDE_TOLERANCE, name
            assert_gradients(outcomes, wanted)


SHOWN: Final = {
    ("mixtral: two of four", "dpo"),
    ("deepseek_v2: yarn", "orm"),
    ("gemma2: low caps", "simpo"),
}
"""In every suite: experts, latent attention, windows and caps of tied embeddings."""


@pytest.mark.exhaustive(by=lambda case, task: {(case, task)} & SHOWN)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", CASES)
def test_each_gradient_is_that_of_transformers(
    gloo_pool: GlooPool, samples: Path, tmp_path: Path, case: str, task: str
) -> None:
    runs: dict[str, Layout] = {
        name: (1, task_values(task, samples, packing=packs), ())
        for name, packs in {"apart": False, "packed": True}.items()
    }
    Models.of(case, samples, tmp_path).check(gloo_pool, task, runs)


TWO_RANKS: Final[Mapping[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "tensors and sequences": (TENSOR, ()),
    "stages": (STAGES, ()),
    "heads exchanged": ({"parallel.context_parallel_size": 2}, ("ulysses",)),
}


@pytest.mark.needs_plugins("ulysses")
@pytest.mark.exhaustive(by=lambda family, task: [])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_two_ranks_have_each_gradient_too(
    gloo_pool: GlooPool, samples: Path, tmp_path: Path, family: Family, task: str
) -> None:
    packed = task_values(task, samples, packing=True)
    runs: dict[str, Layout] = {
        name: (2, {**packed, **sizes}, plugins) for name, (sizes, plugins) in TWO_RANKS.items()
    }
    if family.experts:  # two data-parallel ranks, with a row each
        runs["experts"] = (2, {**task_values(task, samples, packing=False), **EXPERTS}, ())
    case = f"{family.name}: {next(iter(family.variants))}"
    Models.of(case, samples, tmp_path).check(gloo_pool, task, runs)


def assert_gradients(outcomes: Sequence[TaskOutcome], wanted: Mapping[str, Tensor]) -> None:
    whole = full_tensors([outcome.gradients for outcome in outcomes])
    assert whole.problems(WIDE_TOLERANCE) == []
    assert whole.tensors.keys() == wanted.keys()
    errors = {}
    for name, want in wanted.items():
        got = whole.tensors[name]
        assert not got[len(want) :].any(), f"{name}: rows that pad the vocabulary"
        got = got[: len(want)]
        errors[name] = largest_difference(got, want) if want.any() else float(got.abs().max())
    assert max(errors.values()) < WIDE_TOLERANCE, errors
