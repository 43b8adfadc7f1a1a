"""A plugin claims for the platforms npu and cuda only what is verified.

On ``cuda`` one GPU has run the suites, with gloo between ranks: what is about several ranks is not
``real``.

``arithmetic`` is verified by a run with platform npu itself, with the reference operators and a
stub of its device, on two gloo ranks: parity with the CPU, and every call matches torch_npu's
schema. ``real`` and ``emulated`` cannot be verified here.

Features that claim different seams share a trial; one that changes the model has its own, since it
may leave the others nothing to do (adapters freeze what they compute gradients of).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import Claim, Numerics, Support
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.testing.models import MODELS, trial_layout
from ascend_run.testing.parity import GRADIENT_TOLERANCE, compare
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, load_runtime
from benchmarks.campaigns.features import CONFIG, OPTIONS, features, layout_of
from tests.plugins.models.cases import BY_NAME
from tests.plugins.models.test_families import record, reference_of
from tests.plugins.platforms.npu.test_device_path import on_the_cpu, on_the_npu
from tests.support.chats import CHATML, SHORT, write_lines, write_tokenizer
from tests.support.plugin_pages import page_of
from tests.support.preference_files import preferences
from tests.support.rated_solutions import solutions

ROOT = Path(__file__).parent.parent.parent
CATALOGUE = discover()
OURS = CATALOGUE.load(name for name, found in CATALOGUE.items() if found.first_party)
MANIFESTS = {plugin.manifest.name: plugin.manifest for plugin in OURS.values()}
FEATURES = features()
CLAIMING = sorted(n for n, m in MANIFESTS.items() if m.platforms.get("npu") is Support.ARITHMETIC)

NO_DROPOUT = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
"""Ranks that split the batch draw other masks than one rank draws."""
SHOWN_ELSEWHERE = {"npu": "tests/plugins/platforms/npu"}
"""What is no feature, family or task -> where it is shown."""


def bundles(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Each name where it fits first."""
    found: list[tuple[str, ...]] = []
    for name in names:
        fitting = (i for i, those in enumerate(found) if all(_fit(name, one) for one in those))
        if (place := next(fitting, None)) is None:
            found.append((name,))
        else:
            found[place] += (name,)
    return found


def _fit(name: str, other: str) -> bool:
    ours, theirs = MANIFESTS[name], MANIFESTS[other]
    alone = Numerics.MODEL in (ours.numerics, theirs.numerics)
    conflict = name in theirs.conflicts or other in ours.conflicts
    own, others = ({*claims_of(OURS[plugin])} for plugin in (name, other))
    four_ranks = own | others >= {Claim.LINEAR_COMM, Claim.CONTEXT_PARALLEL}
    return not (alone or conflict or four_ranks or own & others)


@pytest.fixture(scope="module")
def expected(gloo_pool: GlooPool) -> Callable[[Trial], list[RankOutcome]]:
    """A plain trial's outcome; each is made once."""
    made: dict[str, list[RankOutcome]] = {}

    def outcome(trial: Trial) -> list[RankOutcome]:
        if str(trial) not in made:
            made[str(trial)] = gloo_pool.run(on_the_cpu, 1, trial, timeout=100)
        return made[str(trial)]

    return outcome


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """What ``[data]`` names where a task reads conversations, or pairs of answers."""
    folder = tmp_path_factory.mktemp("texts")
    chats = {
        "data.tokenizer": str(write_tokenizer(folder / "tokenizer", template=CHATML)),
        "data.train": [write_lines(folder / "train.jsonl", [{"messages": SHORT}])],
        "model.vocab_size": 512,
    }
    named = [write_lines(folder / "pairs.jsonl", preferences(8))]
    pairs = {**chats, "data.train": named, "data.seq_length": 64}
    rated = {
        **pairs,
        "data.train": [write_lines(folder / "solutions.jsonl", solutions(8))],
        "plugins.prm.placeholder_token": "*",  # one token of this tokenizer
    }
    return {"sft": chats, **dict.fromkeys(("dpo", "orm", "simpo"), pairs), "prm": rated}


def trial_of(names: tuple[str, ...], *, sharded: bool, plugins: tuple[str, ...]) -> Trial:
    """The model and layout that these are shown on, with some of them enabled."""
    (name, *_) = names
    sizes: Any = layout_of(names, 2) if name in features() else {"dp": 2}
    layout = trial_layout(sizes) if sharded else {}
    options = {
        k: v for k, v in OPTIONS.items() if k.startswith(tuple(f"plugins.{p}." for p in plugins))
    }
    wanted = {key: value for one in names for key, value in CONFIG.get(one, {}).items()}
    config = {**MODELS["moe"], **wanted, **layout, **options}
    return Trial(plugins=plugins, config=config)


def assert_shown(
    gloo_pool: GlooPool,
    expected: Callable[[Trial], list[RankOutcome]],
    names: tuple[str, ...],
    trial: Trial,
    plain: Trial,
) -> None:
    on_npu = attrs.evolve(trial, config={**trial.config, "platform": "npu"})
    examined = load_runtime().examine(on_npu, 2)
    assert not examined.problems
    assert not examined.idle & {*names}, "a trial that they have no part in"
    results = gloo_pool.run(on_the_npu, 2, trial, timeout=100)
    outcomes = [outcome for outcome, _ in results]
    assert [*compare(outcomes, expected(plain), GRADIENT_TOLERANCE)] == []
    # The fused operators have no cap on scores.
    fuses = not trial.config.get("model.attn_logit_softcapping")
    for _, seen in results:
        assert seen.devices, "it ran on the platform's own device"
        fused = [seen.operators[f"npu_fusion_attention{version}"] for version in ("", "_v2")]
        assert any(fused) is fuses


def seams(names: tuple[str, ...]) -> list[object]:
    """Return what the features of a trial replace; of one that replaces nothing, its name."""
    return [found for name in names for found in claims_of(OURS[name]) or (name,)]


@pytest.mark.exhaustive(
    by=lambda names: {*seams(names)} & {Claim.CONTEXT_PARALLEL, Claim.LINEAR_COMM}
)
@pytest.mark.parametrize("names", bundles([n for n in CLAIMING if n in FEATURES]), ids="+".join)
def test_the_arithmetic_of_features_on_the_npu_is_that_of_the_cpu(
    gloo_pool: GlooPool,
    expected: Callable[[Trial], list[RankOutcome]],
    names: tuple[str, ...],
) -> None:
    changes = MANIFESTS[names[0]].numerics is Numerics.MODEL
    trial = trial_of(names, sharded=True, plugins=names)
    plain = trial_of(names, sharded=False, plugins=names if changes else ())
    assert_shown(gloo_pool, expected, names, trial, plain)


@pytest.mark.exhaustive(by=lambda name: [BY_NAME[name].experts, *BY_NAME[name].values])
@pytest.mark.parametrize("name", [n for n in CLAIMING if CATALOGUE[n].kind is Kind.MODEL])
def test_a_family_on_the_npu_is_that_of_the_cpu(
    gloo_pool: GlooPool,
    expected: Callable[[Trial], list[RankOutcome]],
    tmp_path: Path,
    name: str,
) -> None:
    """The tiny model of the family's own suite, with the family's switches."""
    case = BY_NAME[name]
    folder = reference_of(case, next(iter(case.variants.values())), tmp_path / "theirs").folder
    values = config_from_hf(record(case), read_hf_config(folder))
    training = {key: v for key, v in MODELS["dense"].items() if not key.startswith("model.")}
    plain = {**training, "model.family": name, **values, **case.values, **NO_DROPOUT}
    trials = (Trial(config={**plain, **layout}) for layout in (trial_layout({"dp": 2}), {}))
    assert_shown(gloo_pool, expected, (name,), *trials)


@pytest.mark.exhaustive(by=lambda name: ())
@pytest.mark.parametrize("name", [n for n in CLAIMING if CATALOGUE[n].kind is Kind.TASK])
def test_a_task_on_the_npu_is_that_of_the_cpu(
    gloo_pool: GlooPool,
    expected: Callable[[Trial], list[RankOutcome]],
    texts: Mapping[str, dict[str, Any]],
    name: str,
) -> None:
    config = {**MODELS["dense"], "task": name, **texts.get(name, {})}
    layout = trial_layout({"dp": 2})
    trial, plain = Trial(config={**config, **layout}), Trial(config=config)
    assert_shown(gloo_pool, expected, (name,), trial, plain)


def test_every_claim_is_shown() -> None:
    kinds = {Kind.MODEL, Kind.TASK}
    shown = {n for n in CLAIMING if n in features() or CATALOGUE[n].kind in kinds}
    assert shown | SHOWN_ELSEWHERE.keys() == {*CLAIMING}


def test_no_npu_has_been_seen() -> None:
    shown_on_it = {Support.REAL, Support.EMULATED}
    assert not [n for n, m in MANIFESTS.items() if m.platforms.get("npu") in shown_on_it]


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_its_page_claims_what_its_manifest_claims(name: str) -> None:
    page = page_of(CATALOGUE, name).read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in page if line.lower().startswith("| platforms |"))
    assert ("arithmetic" in row) == (name in CLAIMING)
    of_cuda = next((part for part in row.split(";") if "cuda" in part), "")
    for state in (Support.EMULATED, Support.UNVERIFIED):
        assert (state in of_cuda) == (MANIFESTS[name].platforms.get("cuda") is state)


def test_nccl_has_been_seen_between_no_two_ranks() -> None:
    """A feature that has nothing to do on one rank is about what it sends, or whom to."""
    of_ranks = {
        name
        for name, manifest in MANIFESTS.items()
        if manifest.idle and manifest.idle.field.startswith("parallel.")
    }
    assert of_ranks
    real = {name for name, m in MANIFESTS.items() if m.platforms.get("cuda") is Support.REAL}
    assert not of_ranks & real
    assert not real & {"cuda", *(n for n, found in CATALOGUE.items() if found.kind is Kind.MODEL)}
