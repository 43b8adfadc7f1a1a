"""The context-parallel plugins, as one shared test suite tests them.

A row names its plugin, which is found by its entry point; if that is deleted its rows are dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import Mask
from tests.support.ring_checks import BIASED, CASES, DOCUMENTS, FREE, OWN, PLATFORM
from tests.support.ring_formula import Case

BY_HEADS = ("ulysses", "unaligned-ulysses")
"""All-to-all over heads only: the inner kernel sees full sequences."""
IN_BLOCKS = (
    "ring-attention",
    "double-ring",
    "hybrid-cp",
    "kv-allgather-cp",
    "adaptive-cp",
    "hybrid-adaptive-cp",
)
"""Attend to keys of other ranks, block by block."""

FEW: Mapping[str, Case] = {
    "grouped": Case(groups=2, width=6, value_width=3),
    "multi-query": Case(groups=1),
    "not-causal": Case(mask=FREE, sinks=True),
    "window": Case(mask=Mask(window=(5, 0))),
    "documents": Case(mask=Mask(document_ends=DOCUMENTS)),
    "slopes": Case(slopes=True, sinks=True),
}
ALL = CASES | OWN


def exchange(name: str, **options: Any) -> Any:
    """Create the plugin with these options."""
    (entry,) = entry_points(group="ascend_run.plugins", name=name)
    plugin = entry.load()
    return plugin(plugin.config_class(**options))


@attrs.frozen(kw_only=True)
class Form:
    """A plugin with some options, and its expected properties."""

    plugin: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    cases: Mapping[str, Case] = attrs.field(factory=lambda: FEW)
    size: int = 4
    platform: bool = False

    def shown(form: Form) -> Iterable[Hashable]:
        """Return what the suite must show: every plugin, kernel, kind of attention and option."""
        return [form.plugin, form.platform, *form.cases, *form.options]

    def __str__(self) -> str:
        kernel = "platform" if self.platform else "formula"
        options = "-".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.plugin}-{options or 'default'}-{self.size}-{kernel}"


def rows(table: Iterable[Any]) -> list[Any]:
    """Return rows as parameters; each needs its ``plugin``, or is the name of one."""
    names = ((row, row if isinstance(row, str) else row.plugin) for row in table)
    return [
        pytest.param(row, id=str(row), marks=pytest.mark.needs_plugins(name)) for row, name in names
    ]


WITHOUT_OWN = {name: case for name, case in FEW.items() if name not in OWN}
FORMS = (
    *(
        Form(plugin="ring-attention", cases=cases, size=size)
        for size, cases in ((1, FEW | OWN), (2, ALL), (4, ALL))
    ),
    Form(plugin="ring-attention", cases=WITHOUT_OWN | PLATFORM | BIASED, size=2, platform=True),
    Form(plugin="ring-attention", options={"cut": "contiguous"}),
    Form(plugin="ring-attention", options={"cut": "contiguous"}, size=2),
    Form(plugin="ring-attention", options={"kv_cache": "half"}, cases=FEW | OWN),
    Form(plugin="ring-attention", options={"kv_cache": "full"}),
    *(Form(plugin="double-ring", cases=ALL, size=size) for size in (2, 4)),
    Form(plugin="double-ring", options={"cut": "contiguous"}),
    Form(plugin="double-ring", options={"kv_cache": "half"}, cases=FEW | OWN),
    Form(plugin="double-ring", options={"kv_cache": "full"}),
    Form(plugin="double-ring", options={"window": 1}),
    Form(plugin="double-ring", options={"window": 1}, size=2),
    Form(plugin="double-ring", options={"window": 1, "kv_cache": "half"}),
    Form(plugin="hybrid-cp", cases=ALL),
    Form(plugin="hybrid-cp", options={"cut": "contiguous"}),
    Form(plugin="hybrid-cp", options={"kv_cache": "half"}),
    Form(plugin="hybrid-cp", options={"kv_cache": "full"}),
    Form(plugin="hybrid-cp", options={"ulysses_degree": 1, "window": 2}),
    Form(plugin="hybrid-cp", options={"window": 1}),
    Form(plugin="hybrid-cp", options={"ulysses_degree": 4}),
    Form(plugin="hybrid-cp", options={"ulysses_degree": 1}, cases=CASES, size=2),
    Form(plugin="hybrid-cp", cases=CASES, size=2),
    *(
        Form(plugin="kv-allgather-cp", cases=cases, size=size)
        for size, cases in ((1, FEW | OWN), (2, ALL), (4, ALL))
    ),
    Form(plugin="kv-allgather-cp", options={"cut": "contiguous"}, cases=FEW | OWN),
    Form(
        plugin="kv-allgather-cp",
        options={"kv_cache": "half", "groups_at_once": 3},
        cases=FEW | OWN,
    ),
    Form(plugin="kv-allgather-cp", options={"kv_cache": "full"}, cases=FEW | OWN),
    Form(
        plugin="kv-allgather-cp",
        options={"kv_cache": "full", "groups_at_once": 1},
        cases=FEW | OWN,
    ),
    Form(
        plugin="kv-allgather-cp",
        options={"groups_at_once": 1},
        cases=WITHOUT_OWN | PLATFORM | BIASED,
        platform=True,
    ),
    *(Form(plugin="adaptive-cp", cases=ALL, size=size) for size in (2, 4)),
    *(Form(plugin="adaptive-cp", options={"remap": False}, cases=ALL, size=n) for n in (2, 4)),
    Form(plugin="hybrid-adaptive-cp", cases=ALL),
    Form(plugin="hybrid-adaptive-cp", options={"remap": False}),
    *(
        Form(plugin="hybrid-adaptive-cp", options={"ulysses_degree": degree}, size=size)
        for degree, size in ((1, 4), (4, 4), (1, 2), (2, 2))
    ),
    # By the platform's kernel: biases of all heads, softcap, and what only some of the formulas
    # support.
    *(
        Form(plugin=name, cases=FEW | PLATFORM | BIASED, platform=True)
        for name in (*BY_HEADS, *IN_BLOCKS)
    ),
)
