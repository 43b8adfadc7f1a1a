"""A plugin says of platform npu only what has been shown.

``arithmetic`` is shown by a trial with platform npu itself, over the reference operators and a
stand-in of its device, on two gloo ranks: at parity with the CPU, and every call taken by
torch_npu's schema. ``real`` and ``emulated`` cannot be shown here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import Numerics, Support
from ascend_run.plugin_api.testing.models import MODELS, trial_layout
from ascend_run.plugin_api.testing.parity import GRADIENT_TOLERANCE, compare
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import Trial, load_runtime
from ascend_run.registry.discovery import discover
from benchmarks.campaigns.together import CONFIG, OPTIONS, features, layout_of
from tests.plugins.npu.test_device_path import on_the_cpu, on_the_npu

ROOT = Path(__file__).parent.parent.parent
CATALOGUE = discover()
OURS = CATALOGUE.load(name for name, found in CATALOGUE.items() if found.first_party)
MANIFESTS = {plugin.manifest.name: plugin.manifest for plugin in OURS.values()}
CLAIMING = sorted(n for n, m in MANIFESTS.items() if m.platforms.get("npu") is Support.ARITHMETIC)

FAMILIES = {"gpt2": "dense", "llama": "dense", "mixtral": "moe"}
SHOWN_ELSEWHERE = {
    "npu": "tests/plugins/npu",
    "pretrain": "the task of every trial",
}
"""What is no feature -> where it is shown."""
EXPECTED: dict[str, Any] = {}
"""Plain trials that were made."""


def trial_of(name: str, plugins: tuple[str, ...], *, sharded: bool) -> Trial:
    model = FAMILIES.get(name, "moe")
    family = {"model.family": name} if name in FAMILIES else {}
    sizes: Any = layout_of((name,), 2) if name in features() else {"dp": 2}
    layout = trial_layout(sizes) if sharded else {}
    options = {
        k: v for k, v in OPTIONS.items() if k.startswith(tuple(f"plugins.{p}." for p in plugins))
    }
    config = {**MODELS[model], **CONFIG.get(name, {}), **family, **layout, **options}
    return Trial(plugins=plugins, config=config)


@pytest.mark.parametrize("name", [n for n in CLAIMING if n not in SHOWN_ELSEWHERE])
def test_its_arithmetic_on_the_npu_is_that_of_the_cpu(gloo_pool: GlooPool, name: str) -> None:
    plugins = (name,) if name in features() else ()
    trial = trial_of(name, plugins, sharded=True)
    on_npu = attrs.evolve(trial, config={**trial.config, "platform": "npu"})
    assert name not in load_runtime().examine(on_npu, 2).idle, "a trial that it has no part in"
    changes = MANIFESTS[name].numerics is Numerics.MODEL
    plain = trial_of(name, plugins if changes else (), sharded=False)
    answers = gloo_pool.run(on_the_npu, 2, trial, timeout=100)
    if str(plain) not in EXPECTED:
        EXPECTED[str(plain)] = gloo_pool.run(on_the_cpu, 1, plain, timeout=100)
    expected = EXPECTED[str(plain)]
    outcomes = [outcome for outcome, _ in answers]
    assert [*compare(outcomes, expected, GRADIENT_TOLERANCE)] == []
    for _, seen in answers:
        assert seen.devices, "it ran on the platform's own device"
        assert seen.operators["npu_fusion_attention"] + seen.operators["npu_fusion_attention_v2"]


def test_what_is_shown_elsewhere_is_ours() -> None:
    assert SHOWN_ELSEWHERE.keys() <= MANIFESTS.keys()


def test_no_npu_has_been_seen() -> None:
    shown_on_it = {Support.REAL, Support.EMULATED}
    assert not [n for n, m in MANIFESTS.items() if m.platforms.get("npu") in shown_on_it]


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_its_page_claims_what_its_manifest_claims(name: str) -> None:
    page = (ROOT / f"docs/plugins/{name}.md").read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in page if line.lower().startswith("| platforms |"))
    assert ("arithmetic" in row) == (name in CLAIMING)
