"""Bugs that were seeded for ``verify``, each in one of five plugins that a second run enables."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.testing.models import MODELS
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.bisect.bisection import bisect
from ascend_run.tools.bisect.journal import Journal
from ascend_run.tools.bisect.run_comparing import RunComparer
from ascend_run.tools.verify.capture.record import Record
from ascend_run.tools.verify.questions import Side
from ascend_run.tools.verify.ranks import PoolRanks
from benchmarks.campaigns.seeded_bugs import faults

from .two_runs import mixing_of, write_run, write_tokens

OTHERS: Final = ("rms-norm", "swiglu", "rotary", "flash-attention", "matmul-add")
CASES: Final = (
    "swap-brings-zeros",
    "swap-mixes-layers",
    "gmm-gate-and-up-swapped",
    "gmm-counts-sorted",
    "gmm-router-gradient",
)


class BuggyRanks(PoolRanks):
    """Ranks whose every run has one bug."""

    def __init__(self, pool: GlooPool, name: str) -> None:
        super().__init__(pool)
        self._fault = f"{faults.__name__}:{name}"

    def __call__(self, side: Side, fault: Any = None) -> list[Record]:
        return super().__call__(side, self._fault)


def drawn(name: str) -> tuple[str, ...]:
    """The buggy plugin and four others, in a seeded order."""
    source = random.Random(name)
    enabled = [*faults.BUGS[name].plugins, *source.sample(OTHERS, 4)]
    source.shuffle(enabled)
    return tuple(enabled)


@pytest.mark.exhaustive(by=lambda name: ())
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.needs_plugins(*drawn(n))) for n in CASES]
)
def test_a_seeded_bug_in_one_of_five_plugins_is_found(
    gloo_pool: GlooPool, tmp_path: Path, name: str
) -> None:
    bug = faults.BUGS[name]
    data = {"data.train": [write_tokens(tmp_path)], "data.cache_dir": str(tmp_path / "cache")}
    one = write_run(tmp_path / "a", {**MODELS[bug.model], **data})
    values = {**MODELS[bug.model], **data, **bug.config}
    mixing = mixing_of(one, write_run(tmp_path / "b", values, drawn(name)))
    compare = RunComparer(mixing, BuggyRanks(gloo_pool, name))
    result = bisect(compare, Journal(tmp_path, {"bug": name}), lambda number, changes: None)
    assert result.culprits == bug.plugins
    module, phase = re.fullmatch(r"(.*) \((.*)\)", result.last.where).groups()  # type: ignore[union-attr]
    assert re.fullmatch(bug.modules, module)
    assert phase in bug.phases
