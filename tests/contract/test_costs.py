"""Every feature answers for what it changes of a cost, or is listed with why it changes none."""

from __future__ import annotations

from typing import Final

from ascend_run.registry.discovery import discover
from ascend_run.testing.runtime import load_runtime
from benchmarks.campaigns.features import features
from tests.support.plugin_pages import page_of

CHANGE_NONE: Final = {
    "alibi": "it declares the need of a bias, and the platform answers for its kernel",
    "comm-buffer-auto": "buffers of communicators are the runtime's own memory",
    "ema-adamw": "plan counts the states that its OptimizerSpec declares",
    "eval-generate": "it writes texts between two steps, where activations are freed",
    "fusion-attention-v2": "both versions of the operator keep and compute the same",
    "gloo-offload": "it works while a checkpoint is written or read, beside the step",
    "memory-fragmentation": "it changes where tensors are allocated, not how many bytes they take",
    "memory-timeline": "it counts what is allocated in some steps, and allocates nothing there",
    "moe-tp-extend-ep": "it sets the sizes of the experts' grid, from which plan counts",
    "noop-layers": "core leaves the empty places that it names out of each stage",
    "rotary": "every kernel keeps the tables alone, and gives tensors of one size",
    "shared-experts": "it sets fields of the model, from which plan counts",
    "tensorboard": "it writes what is logged anyway",
}
"""``tests/tools/plan/cost_model/test_saved_by_plugins.py`` measures where there is something."""
SENTENCE: Final = "changes nothing that `plan` counts"


def test_no_feature_is_silent_about_its_cost() -> None:
    runtime = load_runtime()
    answers = {"ascend_cost", "ascend_activation_policy"}
    silent = {name for name in features() if not answers & {*runtime.describe(name).hooks}}

    unknown, mended = silent - {*CHANGE_NONE}, {*CHANGE_NONE} & {*features()} - silent
    assert not unknown, (
        f"{sorted(unknown)}: answer ascend_cost, or say in CHANGE_NONE why plan counts the same"
    )
    assert not mended, f"{sorted(mended)} answer ascend_cost: leave them out of CHANGE_NONE"


def test_their_pages_say_it() -> None:
    for name in {*CHANGE_NONE} & {*features()}:
        page = page_of(discover(), name).read_text()
        assert SENTENCE in " ".join(page.split()), name
