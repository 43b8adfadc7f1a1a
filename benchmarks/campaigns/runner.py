"""Run every case of a campaign once; stopped at any moment, it goes on where it was, also where
cases have come or gone since.

Each outcome is a line of ``build/campaigns/<name>.jsonl`` as soon as it is known. Once all are
there the result is written to ``benchmarks/campaigns/results/<name>.json``: commit, seed, counts,
figures, and every case that did not pass. Where a campaign hashes what a case can reach, the result
also has the hashes, so that another checkout runs only the cases whose hash has changed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from .campaign import FOLDER, PASSED, Campaign, Outcome, find, fingerprint, result_path
from .records import packed, read_committed, read_journal

JOURNALS: Final = FOLDER.parents[1] / "build/campaigns"
Advance = Callable[[int, int], None]
"""Called after each case with the cases done, and how many of them did not pass."""


def run_campaign(
    campaign: Campaign,
    *,
    workers: int = 1,
    fresh: bool = False,
    new: bool = False,
    limit: int | None = None,
    journals: Path = JOURNALS,
    results: Path | None = None,
) -> dict[str, Any] | None:
    """Run the cases without a record: in the journal or, if the campaign hashes what a case can
    reach, in the last result.

    Args:
        workers: Processes; 1 runs every case in this one.
        fresh: Ignore what earlier runs have done.
        new: Run only cases that the last result does not have. Its records stay, each with the
            commit and the hash of the code that it ran on.
        limit: Stop after so many cases of this call.
        results: Folder in place of the one in git.

    Returns:
        The result; None where cases are left.
    """
    cases = list(campaign.cases(campaign.seed))
    assert len(set(cases)) == len(cases), f"{campaign.name}: two cases have one key"
    journal = journals / f"{campaign.name}.jsonl"
    if fresh:
        journal.unlink(missing_ok=True)
    target = result_path(campaign.name) if results is None else results / f"{campaign.name}.json"
    reaches = {case: campaign.reach(case) if campaign.reach else "" for case in cases}
    committed = {} if fresh else read_committed(target, campaign, reaches, changed=new)
    done = {**committed, **read_journal(journal, campaign, reaches)}
    left = [case for case in cases if case not in done][:limit]
    commit = _commit()
    began = time.monotonic()
    with _progress(campaign.name, len(cases)) as advance, journal.open("a") as stream:
        failed = sum(o["outcome"]["verdict"] != PASSED for o in done.values())
        advance(len(done), failed)
        for case, outcome in _outcomes(campaign, left, workers):
            record = {"case": case, "commit": commit, "outcome": dict(outcome)}
            record |= {"reach": reaches[case]} if campaign.reach else {}
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            done[case] = record
            failed += outcome["verdict"] != PASSED
            advance(len(done), failed)
    if len(done) < len(cases):
        return None
    result = _result(campaign, {case: done[case] for case in cases}, time.monotonic() - began)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def run_case(campaign: Campaign, case: str) -> Outcome:
    """One outcome, whatever happens."""
    try:
        return campaign.run(case)
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-3:])
        return {"verdict": "error", "why": f"{type(error).__name__}: {error}", "where": where}


def _run_named(name: str, case: str) -> Outcome:
    return run_case(find(name), case)


def _outcomes(
    campaign: Campaign, cases: Sequence[str], workers: int
) -> Iterator[tuple[str, Outcome]]:
    if campaign.run_all is not None:
        yield from campaign.run_all(cases, workers)
        return
    if workers == 1:
        yield from ((case, run_case(campaign, case)) for case in cases)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_run_named, campaign.name, case): case for case in cases}
        for future in as_completed(running):
            yield running[future], future.result()


def _result(
    campaign: Campaign, records: Mapping[str, Mapping[str, Any]], seconds: float
) -> dict[str, Any]:
    outcomes = {case: record["outcome"] for case, record in records.items()}
    counts = dict(sorted(Counter(o["verdict"] for o in outcomes.values()).items()))
    figures = dict(campaign.figures(outcomes))
    passed = {"records": packed([*records.values()])} if campaign.reach else {}
    return {
        "campaign": campaign.name,
        "commits": list(dict.fromkeys(record["commit"] for record in records.values())),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "seconds_of_last_call": round(seconds, 1),
        "seed": campaign.seed,
        "cases": len(outcomes),
        "fingerprint": fingerprint(list(outcomes)),
        "counts": counts,
        "figures": figures,
        "passes": campaign.passes(figures, counts),
        "failures": [
            {"case": case, **outcome}
            for case, outcome in outcomes.items()
            if outcome["verdict"] != PASSED
        ],
        **passed,
    }


def _commit() -> str:
    """The commit that runs, with a word where the package's files are not as it has them."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=FOLDER, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/ascend_run")
        return git("rev-parse", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def _progress(name: str, total: int) -> Iterator[Advance]:
    """A bar where someone looks, and a line every minute without a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn(name),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    shown = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(done: int, failed: int) -> None:
            nonlocal shown
            progress.update(task, completed=done, description=f"{failed} not passed")
            if not console.is_terminal and time.monotonic() - shown > 60:
                shown = time.monotonic()
                console.print(f"{name}: {done} of {total}, {failed} not passed")

        yield advance
