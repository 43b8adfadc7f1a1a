"""Every context-parallel plugin on 1, 2 and 4 ranks against attention on the full sequence, in
float64."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import HookError
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.pool import GlooPool
from tests.support import ring_checks as checks
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case, FormulaKernel

from .exchanges import BY_HEADS, FORMS, IN_BLOCKS, Form, exchange, rows

KV_CACHE = st.sampled_from(["none", "half", "full"])
CUT = st.sampled_from(["zig-zag", "contiguous"])
DRAWN: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
    "ulysses": {"kv_cache": KV_CACHE},
    "ring-attention": {"kv_cache": KV_CACHE, "cut": CUT},
    "double-ring": {"kv_cache": KV_CACHE, "cut": CUT},
    "hybrid-cp": {"kv_cache": KV_CACHE, "cut": CUT},
    "kv-allgather-cp": {
        "kv_cache": KV_CACHE,
        "cut": CUT,
        "groups_at_once": st.sampled_from([None, 1, 3]),
    },
    "adaptive-cp": {"chunks_per_rank": st.sampled_from([2, 4]), "remap": st.booleans()},
}
"""Options for which any problem must be solved."""


@pytest.mark.exhaustive(by=Form.shown)
@pytest.mark.parametrize("form", rows(FORMS))
def test_output_log_sum_exp_and_every_gradient_match_one_rank(
    gloo_pool: GlooPool, form: Form
) -> None:
    plugin = exchange(form.plugin, **form.options)
    checks.assert_at_parity(gloo_pool, plugin, form.cases, form.size, form.platform)


@pytest.mark.exhaustive(by=lambda name: [name in BY_HEADS])
@pytest.mark.parametrize("name", rows(DRAWN))
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_problem_is_at_parity(gloo_pool: GlooPool, name: str, data: st.DataObject) -> None:
    """For all-to-all over heads on two ranks, which can share all drawn heads, and with the
    platform's kernel, which has sinks."""
    options = data.draw(st.fixed_dictionaries(DRAWN[name]))
    multiple = 16 if "remap" in options else 8
    drawn = data.draw(st.lists(checks.cases(multiple), min_size=4, max_size=4))
    named, alone = {str(case): case for case in drawn}, name in BY_HEADS
    plugin = exchange(name, **options)
    checks.assert_at_parity(gloo_pool, plugin, named, 2 if alone else 4, platform=alone)


@attrs.frozen(kw_only=True)
class InBfloat16:
    plugin: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    shape: Mapping[str, int] = attrs.field(factory=dict)
    size: int = 4

    def __str__(self) -> str:
        return "-".join([self.plugin, *map(str, self.options.values()), str(self.size)])


@pytest.mark.exhaustive(by=lambda row: [row.plugin in BY_HEADS])
@pytest.mark.parametrize(
    "row",
    rows(
        [
            InBfloat16(plugin="ulysses", shape={"groups": 1}),
            InBfloat16(
                plugin="ulysses",
                options={"kv": "all-gather", "kv_cache": "none"},
                shape={"groups": 1},
            ),
            InBfloat16(plugin="unaligned-ulysses", shape={"heads": 6, "groups": 2, "length": 125}),
            InBfloat16(plugin="ring-attention", size=2),
            InBfloat16(plugin="ring-attention"),
            InBfloat16(plugin="double-ring"),
            InBfloat16(plugin="hybrid-cp"),
            InBfloat16(plugin="kv-allgather-cp", options={"groups_at_once": 1}, size=2),
            InBfloat16(plugin="kv-allgather-cp", options={"groups_at_once": 1}),
            InBfloat16(plugin="adaptive-cp"),
            InBfloat16(plugin="hybrid-adaptive-cp"),
        ]
    ),
)
def test_in_bfloat16_it_loses_at_most_twice_what_the_kernel_loses(
    gloo_pool: GlooPool, row: InBfloat16
) -> None:
    checks.assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
        gloo_pool, exchange(row.plugin, **row.options), row.size, **row.shape
    )


@attrs.frozen(kw_only=True)
class Dropping:
    plugin: str
    blocks: int
    """Of each of 4 ranks."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    case: Case = attrs.field(factory=Case)

    def __str__(self) -> str:
        return f"{self.plugin}-{self.blocks}"


@pytest.mark.exhaustive(by=lambda row: [row.plugin in BY_HEADS, *row.options, row.case.mask.causal])
@pytest.mark.parametrize(
    "row",
    rows(
        [
            Dropping(
                plugin="ulysses",
                blocks=1,
                options={"kv_cache": "none"},
                case=Case(heads=8, groups=2, sinks=True, slopes=True),
            ),
            Dropping(plugin="unaligned-ulysses", blocks=1, case=Case(heads=6, groups=3)),
            Dropping(plugin="ring-attention", blocks=4),
            # One call for each of four documents, except at the first step.
            Dropping(
                plugin="ring-attention",
                blocks=1 + 3 * 4,
                case=Case(mask=c.Mask(document_ends=(8, 16, 24))),
            ),
            Dropping(plugin="double-ring", blocks=4),
            Dropping(plugin="hybrid-cp", blocks=2),
            # Two of four heads at a time: own keys, all before both chunks, and those between.
            Dropping(
                plugin="kv-allgather-cp",
                blocks=2 * 2,
                options={"groups_at_once": 2},
                case=Case(mask=checks.FREE),
            ),
            # Without a mask one block with own keys, and one for each other rank's.
            Dropping(
                plugin="adaptive-cp",
                blocks=4,
                options={"remap": False},
                case=Case(mask=checks.FREE),
            ),
            Dropping(
                plugin="hybrid-adaptive-cp",
                blocks=2,
                options={"remap": False},
                case=Case(mask=checks.FREE),
            ),
        ]
    ),
)
def test_each_block_has_its_own_dropout_mask_replayed_in_backward(
    gloo_pool: GlooPool, row: Dropping
) -> None:
    checks.assert_every_block_drops_other_places_and_backward_replays_them(
        gloo_pool, exchange(row.plugin, **row.options), row.blocks, row.case
    )


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


@pytest.mark.parametrize("name", rows(IN_BLOCKS))
def test_an_inner_kernel_that_cannot_do_blocks_is_refused(name: str) -> None:
    """With the reasons, before a process group is used."""
    wrap = exchange(name).ascend_attention(
        config=jobs.run_of(4), groups=SimpleNamespace(), layer_index=0
    )
    with pytest.raises(HookError, match=rf"{name} cannot .* Unfit") as refused:
        wrap(Unfit(frozenset({"q"})))
    assert len(refused.value.problems) == 3
    with pytest.raises(HookError) as refused:
        wrap(Unfit(frozenset({"q", "out"})))
    assert len(refused.value.problems) == 2


@pytest.mark.parametrize("name", rows(("ring-attention", "kv-allgather-cp", "adaptive-cp")))
def test_it_takes_what_the_inner_kernel_takes_and_sinks_too(gloo_pool: GlooPool, name: str) -> None:
    inner = jobs.platform_kernel().features
    ((platform, formula),) = gloo_pool.run(jobs.features, 1, exchange(name))
    assert inner == attrs.evolve(platform, sinks=inner.sinks)
    assert not formula.bias
    assert formula.sinks
