"""Every recorded call against every release of torch_npu from 2.7 on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.plugin_api import PlatformError
from ascend_run.plugins.platforms.npu import Npu, gaps
from ascend_run.plugins.platforms.npu.forms import FORMS
from ascend_run.plugins.platforms.npu.gaps import KNOWN_GAPS, RECORD, as_ranges, lacking, taking
from ascend_run.plugins.platforms.npu.proof import probe
from ascend_run.plugins.platforms.npu.proof.binding import parse
from ascend_run.plugins.platforms.npu.proof.calls import Call
from ascend_run.plugins.platforms.npu.proof.releases import REFERENCE, Releases, releases
from scripts.npu_schemas import operators_called

from .reference import RECORD as ASKED
from .stand_in import npu_on_the_cpu

CALLS = probe.known_calls()


def test_every_call_binds_in_every_release_except_the_listed_gaps() -> None:
    gaps = {(gap.operator, gap.problem): gap.releases for gap in releases().gaps(CALLS.values())}
    assert gaps == KNOWN_GAPS


def test_the_record_of_calls_has_every_operator() -> None:
    assert {call.operator for call in CALLS.values()} == {*operators_called()}
    assert {*operators_called()} <= releases().operators


def test_the_library_says_what_torch_npu_itself_says() -> None:
    """For the release that can be imported here: the strings are the schemas."""
    for name, schema in ASKED["schemas"].items():
        assert parse(schema) in releases().overloads(name, REFERENCE)


def altered(operator: str, old: str, new: str, *, until: str) -> Releases:
    """Return the releases as if an argument differed in one of them and earlier ones."""
    record = copy.deepcopy(json.loads(RECORD.read_text(encoding="utf-8")))
    names: list[str] = record["releases"]
    before, after = names[: names.index(until) + 1], names[names.index(until) + 1 :]
    everywhere = releases().ranges(names)
    variants: dict[str, Any] = record["operators"][operator]
    for schema, ranges in [*variants.items()]:
        assert tuple(ranges) == everywhere, "an operator of one schema, for this test"
        assert old in schema
        variants[schema] = releases().ranges(after)
        variants[schema.replace(old, new)] = releases().ranges(before)
    return Releases(record)


@pytest.mark.parametrize(
    ("operator", "old", "new", "problem"),
    [
        ("npu_rms_norm", ", float epsilon=1e-06", "", "takes 2 arguments by position, not 3"),
        ("npu_rms_norm", "Tensor gamma", "Tensor weight", "has 'weight' in place 2, not 'gamma'"),
        (
            "npu_rms_norm",
            "float epsilon=1e-06",
            "bool x=False",
            "takes bool as 'x', not float",
        ),
        ("npu_swiglu", "int dim=-1", "int dim=-1, *, Tensor up", "is not given 'up'"),
    ],
)
def test_a_changed_argument_is_found_with_its_releases(
    operator: str, old: str, new: str, problem: str
) -> None:
    changed = altered(operator, old, new, until="2.9.1")
    found = [gap for gap in changed.gaps(CALLS.values()) if gap.operator == operator]
    assert [str(gap) for gap in found] == [f"{operator} {problem} in torch_npu 2.7.1 - 2.9.1"]


def test_an_operator_that_is_gone_is_found_with_its_releases() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    ((schema, _),) = record["operators"]["npu_swiglu"].items()
    record["operators"]["npu_swiglu"] = {schema: ["2.8.0 - 2.13.0"]}
    found = [gap for gap in Releases(record).gaps(CALLS.values()) if gap.operator == "npu_swiglu"]
    assert [str(gap) for gap in found] == [
        "npu_swiglu is not there in torch_npu 2.7.1 - 2.7.1.post11, 2.14.0"
    ]


def test_another_default_of_what_is_left_out_is_found() -> None:
    call = Call.of("npu_swiglu", (torch.ones(2, 4),), {})
    other = altered("npu_swiglu", "dim=-1", "dim=0", until="2.9.1")
    assert other.problems(call, "2.9.1") == ["takes 0 for a missing 'dim', not -1"]
    assert other.problems(call, "2.13.0") == []


def test_neighbours_are_one_range() -> None:
    names = ("1", "2", "3", "4", "5")
    assert as_ranges(names, {"1", "2", "4"}) == ("1 - 2", "4")
    assert as_ranges(names, {*names}) == ("1 - 5",)


def test_the_page_gives_their_number_and_every_gap() -> None:
    page = (Path(__file__).parents[4] / "docs/npu-proof.md").read_text(encoding="utf-8")
    names = releases().names
    assert f"{len(names)} releases are\nrecorded, {names[0]} to {names[-1]}" in page
    for operator, _ in KNOWN_GAPS:
        assert operator.replace("_grad", "") in page


@pytest.mark.parametrize("operator", sorted({operator for operator, _ in KNOWN_GAPS}))
def test_what_a_release_lacks_is_known_by_its_name(operator: str) -> None:
    """As in the record, for post-releases and local builds too; unknown names are not guessed."""
    of_it = [call for call in CALLS.values() if call.operator == operator]
    for release in releases().names:
        fails = any(releases().problems(call, release) for call in of_it)
        assert (operator in lacking(release)) == (operator in lacking(f"{release}+abc")) == fails
    assert operator not in lacking("")
    assert operator not in lacking("nightly")


def test_a_run_asks_no_release_for_what_it_lacks() -> None:
    """The torch implementation replaces an operator; a kernel without one is rejected."""
    for release in releases().names:
        missing = lacking(release)
        with npu_on_the_cpu(version=release):
            Npu().ascend_device(local_rank=0)
            ops = Npu().ascend_platform_ops()
        assert ops.fused.keys() == {
            n for n, form in FORMS.items() if not missing.keys() & {*form.calls}
        }
        assert ops.attention_kernels["v1"]().version == 1
        second = ops.attention_kernels["v2"]
        if "npu_fusion_attention_v2" not in missing:
            assert second(layout="BNSD").version == 2
            continue
        with pytest.raises(PlatformError) as refusal:
            second(layout="BNSD")
        assert str(refusal.value) == (
            "platform npu: attention kernel v2 calls npu_fusion_attention_v2, which has no "
            f"argument 'softmax_layout' in torch_npu {release}; install torch_npu "
            "2.7.1.post2 - 2.7.1.post11, 2.8.0.post2 or later, or use kernel v1"
        )


def test_a_message_names_the_releases_that_have_an_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = "2.7.1.post8 - 2.7.1.post11, 2.9.0.post6 - 2.9.0.post9, 2.10.0.post4 or later"
    assert taking("npu_ring_attention_update") == ring
    monkeypatch.setattr(gaps, "KNOWN_GAPS", {("npu_gone", "is not there"): ("2.13.0 - 2.14.0",)})
    assert taking("npu_gone") == "2.7.1 - 2.12.0.post3"
