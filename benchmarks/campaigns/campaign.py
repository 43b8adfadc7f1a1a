"""What a campaign is, and the results of those that were run in full."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "results"

PASSED: Final = "passed"
"""The verdict of a case that is as it should be; every other word is a failure."""

Outcome = Mapping[str, Any]
"""JSON values; ``verdict`` is ``passed`` or one word for what went wrong."""


def _passes(figures: Mapping[str, Any], counts: Mapping[str, int]) -> bool:
    return set(counts) <= {PASSED}


@attrs.frozen(kw_only=True)
class Campaign:
    """A seeded list of cases, and what is done with each.

    A module ``benchmarks/campaigns/<name with underscores>.py`` holds it as ``CAMPAIGN``.
    """

    name: str
    seed: int
    cases: Callable[[int], Sequence[str]]
    """From the seed to the key of each case, in the order in which they run: pure, as a resumed
    campaign asks again, and cheap, as a test of the suite does."""
    run: Callable[[str], Outcome]
    """One case, by its key. An exception is the verdict ``error``, and the campaign goes on."""
    run_all: Callable[[Sequence[str], int], Iterator[tuple[str, Outcome]]] | None = None
    """From several cases and the number of processes to each outcome as soon as it is known, for
    cases that share a process. None: ``run`` of each."""
    figures: Callable[[Mapping[str, Outcome]], Mapping[str, Any]] = lambda outcomes: {}
    """From all outcomes to the figures that are quoted."""
    passes: Callable[[Mapping[str, Any], Mapping[str, int]], bool] = _passes
    """Whether figures and counts of verdicts are good enough; default: every case passed."""
    reach: Callable[[str], str] | None = None
    """From the key of a case to a hash of the code that it can reach. An outcome whose hash is the
    present one is not recomputed, on this commit or another. None: outcomes of the journal
    are kept whatever has changed."""


def find(name: str) -> Campaign:
    """The campaign of a name.

    Raises:
        ModuleNotFoundError: There is none.
    """
    found = importlib.import_module(f"{__package__}.{name.replace('-', '_')}").CAMPAIGN
    assert isinstance(found, Campaign), f"{name}: CAMPAIGN is no Campaign"
    return found


def names() -> list[str]:
    """Every campaign, by the modules that mention one."""
    modules = sorted(FOLDER.glob("*.py"))
    return [
        path.stem.replace("_", "-")
        for path in modules
        if "\nCAMPAIGN = " in path.read_text(encoding="utf-8")
    ]


def digest(case: str) -> str:
    """Return a short name of a case, by its key."""
    return hashlib.sha256(case.encode()).hexdigest()[:16]


def fingerprint(cases: Sequence[str]) -> str:
    """Which cases, in which order, in a few characters."""
    return hashlib.sha256("\n".join(cases).encode()).hexdigest()[:16]


def sample(campaign: Campaign, count: int, seed: int = 0) -> list[str]:
    """A seeded sample of the cases, for the test suite."""
    cases = campaign.cases(campaign.seed)
    return random.Random(seed).sample(list(cases), min(count, len(cases)))


def result_path(name: str) -> Path:
    """The file of a full run's result."""
    return RESULTS / f"{name}.json"


def read_result(name: str) -> dict[str, Any]:
    """The result of the last full run, as it is in git."""
    result: dict[str, Any] = json.loads(result_path(name).read_text(encoding="utf-8"))
    return result


def is_full(campaign: Campaign, result: Mapping[str, Any]) -> bool:
    """Whether a result is of all cases that the campaign has now."""
    cases = campaign.cases(campaign.seed)
    return (result["seed"], result["cases"], sum(result["counts"].values())) == (
        campaign.seed,
        len(cases),
        len(cases),
    ) and fingerprint(cases) == result["fingerprint"]
