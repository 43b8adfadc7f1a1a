"""``verify`` against seeded bugs: how many it finds, and how many it finds in the right place.

A bug is in the code of all runs that are compared, with the plugin and without, in the layout and
on one rank, as a mistake in a release would be. A rank that raises counts as not found.

Two patches that were written first are not among the bugs, as no number of a run shows them: a
swapped view read from the beginning of its storage (what is swapped are whole storages), and an
output layer that the loss reads without waiting for its gathered weight (with one bucket it has
come by then, with more Megatron raises).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ascend_run.tools.verify.ranks import PoolRanks

from .campaign import PASSED, Campaign, Outcome
from .pool_of_ranks import pool
from .seeded_bugs.bug import Bug
from .seeded_bugs.faults import BUGS, BY_OTHERS, FIRST

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.capture.training_record import TrainingRecord
    from ascend_run.tools.verify.compare.verdict import Verdict
    from ascend_run.tools.verify.questions import Side

_ASKED: Final = 60
"""Of so many, the share that must be found and named is given."""
_FOUND: Final = 58
_NAMED: Final = 50
BLIND: Final = "of those by an author who had not read verify"


class BuggyRanks(PoolRanks):
    """Ranks whose every run has one bug."""

    def __init__(self, name: str) -> None:
        super().__init__(pool())
        self._fault = f"{BuggyRanks.__module__.rpartition('.')[0]}.seeded_bugs.faults:{name}"

    def __call__(self, side: Side, fault: Any = None) -> list[Record]:
        return super().__call__(side, self._fault)

    def train(
        self, side: Side, until: int, fault: Any = None, *, new: bool = False
    ) -> list[TrainingRecord]:
        return super().train(side, until, self._fault, new=new)


def verdict_on(bug: Bug) -> Verdict:
    """What ``verify`` says of the run in which a bug shows."""
    from ascend_run.tools.verify.questions import Question
    from ascend_run.tools.verify.verifier import Verifier

    question = Question(
        enable=bug.plugins,
        layout=dict(bug.layout),
        model=bug.model,
        config=dict(bug.config),
        resume=bug.resume,
    )
    return Verifier(BuggyRanks(bug.name))(question)


def run(case: str) -> Outcome:
    bug = BUGS[case]
    verdict = verdict_on(bug)
    fault = verdict.fault
    named = "" if fault is None else fault.module
    loss = [check for check in verdict.checks if check.name == "loss"]
    return {
        "verdict": PASSED if fault is not None else "undetected",
        "says": verdict.sentence(),
        "names the place": re.fullmatch(bug.modules, named) is not None,
        "place": bug.modules,
        "names the phase": fault is not None and fault.phase in bug.phases,
        "phases": list(bug.phases),
        "suspects": [] if fault is None else list(fault.suspects),
        "loss is right": all(check.passed for check in loss),
        "should hide from the loss": bug.hides_from_loss,
        "layout": dict(bug.layout),
        "plugins": list(bug.plugins),
    }


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    unread = {bug.name for bug in BY_OTHERS}
    return {
        **_figures(outcomes),
        BLIND: _figures({name: outcome for name, outcome in outcomes.items() if name in unread}),
        "found at another place": _said(outcomes, "names the place"),
        "found in another phase": _said(outcomes, "names the phase"),
    }


def _figures(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    known = [o for o in outcomes.values() if "loss is right" in o]  # others raised
    found = [o for o in known if o["verdict"] == PASSED]
    return {
        "bugs": len(outcomes),
        "found": len(found),
        "found at the right place": sum(o["names the place"] for o in found),
        "found in the right phase": sum(o["names the phase"] for o in found),
        "found though the loss is right": sum(o["loss is right"] for o in found),
        "said to leave the loss right": sum(o["should hide from the loss"] for o in known),
        "of those, the loss is right": sum(
            o["should hide from the loss"] and o["loss is right"] for o in known
        ),
    }


def _said(outcomes: Mapping[str, Outcome], wanted: str) -> dict[str, str]:
    """What was said of each found bug of which something is not right."""
    return {
        name: o["says"] for name, o in outcomes.items() if o["verdict"] == PASSED and not o[wanted]
    }


def passes(figures: Mapping[str, Any], counts: Mapping[str, int]) -> bool:
    share = figures["bugs"] / _ASKED
    return (
        figures["bugs"] >= _ASKED
        and figures["found"] >= math.ceil(_FOUND * share)
        and figures["found at the right place"] >= math.ceil(_NAMED * share)
        and figures["of those, the loss is right"] == figures["said to leave the loss right"]
    )


def cases(seed: int) -> Sequence[str]:
    return tuple(bug.name for module in FIRST for bug in module.BUGS)


CAMPAIGN = Campaign(
    name="verify-bugs", seed=0, cases=cases, run=run, figures=figures, passes=passes
)
