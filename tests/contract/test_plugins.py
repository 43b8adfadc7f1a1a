"""Rules for every built-in plugin: the conformance kit, as for third parties, and those of this
tree; a line in setup.cfg is enough to check a new plugin."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.families import FamilyPlugin
from ascend_run.plugin_api import Numerics
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Plugin
from ascend_run.testing.conformance import CHECKS, Check, Means, Subject
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import load_runtime
from tests.plugins.models.cases import FAMILIES
from tests.support.chats import CHATML, SHORT, write_lines, write_tokenizer
from tests.support.latent_models import LATENT
from tests.support.plugin_pages import page_of
from tests.support.preference_files import preferences
from tests.support.rated_solutions import solutions

FAMILIES_OF_ONE_SUITE = {family.name for family in FAMILIES}
"""Model families that differ in data only, tested by one suite over all of them."""
UNKNOWN_TO_TRANSFORMERS = {family.name for family in FAMILIES if family.reference != family.name}
"""Their suite compares them with another family of transformers, or with a formula."""
ROOT = Path(__file__).parent.parent.parent
CATALOGUE = discover()
LOADED = CATALOGUE.load(name for name, found in CATALOGUE.items() if found.first_party)
OURS = sorted({plugin.manifest.name for plugin in LOADED.values()})

SETTINGS: Mapping[str, Any] = {
    "plugins.compile.regions": "parts",  # the same code in smaller graphs, in half the time
}
"""More than manifests declare in ``small_model_settings``."""
MODELS_OF: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": LATENT,
}
"""What the model must be for a plugin."""
IDLE_IN: Mapping[str, Mapping[str, Any]] = {
    "rms-norm": {"model.normalization": "LayerNorm"},
    "rotary": {"model.position_embedding_type": "none"},
    "swiglu": {"model.gated_linear_unit": False},
}
"""A model in which a plugin is idle, where no model of the kit is one."""
OF_A_RUN = frozenset(
    f"KIT-{name}"
    for name in (
        *("PATCH", "UNDO", "AGAIN", "PARITY", "NEEDS", "LISTENERS", "GRADIENTS", "RESUME"),
        "FAMILY",
    )
)
"""Checks that run models."""
FAMILIES_RUN = frozenset({"deepseek_v2", "gpt2"})
"""Families that are checked in runs for all: latent attention, and learned positions. Those
without code cannot differ in what these checks find; ``tests/plugins/models`` runs each."""
REASONS = {
    "KIT-OPTIONS": "it has no options",
    "KIT-BOUNDS": "it has no options",
    "KIT-PATCH": "a platform may replace parts of torch while its device is active",
    "KIT-DRAWS": "it does not declare to be bitwise",
    "KIT-FAMILY": "it is not a model family",
    "KIT-LISTENERS": "it has no listener",
    "KIT-GRADIENTS": "it has no effect on one rank, and no attention kernel",
    "KIT-IDLE": "its manifest names no condition under which it is idle",
}
"""Check -> the one reason for which it may say nothing, beside a device that is not here."""


@pytest.fixture(scope="module")
def subjects(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", [{"messages": SHORT}] * 8)
    chats = {
        "data.train": [str(folder / "train.jsonl")],
        "data.tokenizer": str(folder / "tokenizer"),
        "model.vocab_size": 512,
    }
    write_lines(folder / "pairs.jsonl", preferences(8))
    pairs = {**chats, "data.train": [str(folder / "pairs.jsonl")], "data.seq_length": 64}
    write_lines(folder / "solutions.jsonl", solutions(8))
    rated = {**pairs, "data.train": [str(folder / "solutions.jsonl")]}
    means = Means(load_runtime(), lambda: gloo_pool, SETTINGS)
    others = {
        name: Means(load_runtime(), lambda: gloo_pool, {**SETTINGS, **settings})
        for name, settings in {
            "sft": chats,
            **dict.fromkeys(("dpo", "orm", "simpo"), pairs),
            "prm": rated,
            **MODELS_OF,
        }.items()
    }
    found = {name: Subject(name, others.get(name, means)) for name in OURS}
    for name, settings in IDLE_IN.items():
        if name in found:
            idle = Means(load_runtime(), lambda: gloo_pool, {**SETTINGS, **settings})
            found[f"{name} idle"] = Subject(name, idle)
    return found


def plugin(name: str) -> Plugin:
    return LOADED[name]


def is_only_a_record(name: str) -> bool:
    """Whether a plugin is a model family and has no function of its own."""
    found = LOADED[name]
    return FamilyPlugin in found.__bases__ and not any(map(callable, vars(found).values()))


KIT = [
    pytest.param(name, check, id=f"{name}-{check.code}")
    for name in OURS
    for check in CHECKS
    if check.code not in OF_A_RUN or name in FAMILIES_RUN or not is_only_a_record(name)
]


def shown(name: str, check: Check) -> list[Hashable]:
    """Return what the suite must show: each check of a run, for a plugin of each kind; all others
    for each plugin. The own suite of a plugin compares its runs too, bit for bit if it is bitwise,
    and records import alike."""
    bitwise = LOADED[name].manifest.numerics is Numerics.BITWISE
    of_a_run = check.code in OF_A_RUN or (check.code == "KIT-DRAWS" and bitwise)
    if of_a_run or (check.code == "KIT-IMPORT" and is_only_a_record(name)):
        return [check.code, CATALOGUE[name].kind]
    return [(name, check.code)]


@pytest.mark.exhaustive(by=shown)
@pytest.mark.parametrize(("name", "check"), KIT)
def test_it_passes_the_kit(subjects: dict[str, Subject], name: str, check: Check) -> None:
    idle = check.code == "KIT-IDLE" and name in IDLE_IN
    verdict = check.judge(subjects[f"{name} idle" if idle else name])

    assert not verdict.problems, check.message(name, verdict)
    reason = verdict.not_applicable
    if reason and not reason.startswith("its device is not available"):
        if check.code == "KIT-FAMILY" and name in UNKNOWN_TO_TRANSFORMERS:
            assert "has no causal model of the type" in reason
        else:
            assert reason == REASONS[check.code]


@pytest.mark.parametrize("name", OURS)
def test_it_is_a_folder_of_its_name_with_a_page_and_a_suite(name: str) -> None:
    module = CATALOGUE[name].entry_point.module
    folder = f"{CATALOGUE[name].category}/{name.replace('-', '_')}"

    assert module == f"ascend_run.plugins.{folder.replace('/', '.')}"
    assert page_of(CATALOGUE, name).read_text(encoding="utf-8").startswith("# ")
    suite = [*(ROOT / f"tests/plugins/{folder}").glob("test_*.py")]
    assert suite or name in FAMILIES_OF_ONE_SUITE
