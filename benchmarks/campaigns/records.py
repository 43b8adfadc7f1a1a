"""Outcomes that are known already: of the journal of this checkout, and of the result in git.

A record is a case, the commit that ran it, its outcome and, where the campaign hashes what a case
can reach, that hash. It stands for as long as the hash is the present one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .campaign import PASSED, Campaign, digest

Record = Mapping[str, Any]


def read_journal(
    journal: Path, campaign: Campaign, reaches: Mapping[str, str]
) -> dict[str, Record]:
    """Return case -> record, of the present cases only.

    The journal keeps the others, which may be those of a process that runs other cases. It is begun
    again if it is that of another seed.

    Args:
        reaches: Every present case -> its hash, which is empty if the campaign has none.
    """
    head = {"campaign": campaign.name, "seed": campaign.seed}
    text = journal.read_text() if journal.exists() else ""
    records = [record for line in text.splitlines() if (record := _parsed(line)) is not None]
    if [{key: first.get(key) for key in head} for first in records[:1]] != [head]:
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text(json.dumps(head) + "\n")
        return {}
    if not text.endswith("\n"):
        with journal.open("a") as stream:
            stream.write("\n")  # so that what comes next does not stand behind half a line
    return {r["case"]: r for r in records[1:] if _stands(r, reaches)}


def read_committed(
    path: Path, campaign: Campaign, reaches: Mapping[str, str], *, changed: bool = False
) -> dict[str, Record]:
    """Return case -> record of the cases that passed in a result; none without hashes.

    Args:
        changed: Also those whose code has changed since.
    """
    if campaign.reach is None or not path.exists():
        return {}
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["seed"] != campaign.seed:
        return {}
    names = {digest(case): case for case in reaches}
    found = (
        {**{key: group[key] for key in ("reach", "commit", "outcome")}, "case": names[name]}
        for group in result.get("records", ())
        for name in group["cases"].split()
        if name in names
    )
    return {record["case"]: record for record in found if changed or _stands(record, reaches)}


def packed(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the records of cases that passed for a result: those that differ in their case only
    are one entry, with the digests of their cases."""
    groups: dict[str, list[str]] = {}
    for record in records:
        if record["outcome"]["verdict"] == PASSED:
            shared = {key: record[key] for key in ("reach", "commit", "outcome")}
            groups.setdefault(json.dumps(shared), []).append(digest(record["case"]))
    return [{**json.loads(shared), "cases": " ".join(names)} for shared, names in groups.items()]


def _stands(record: Record, reaches: Mapping[str, str]) -> bool:
    """Whether the case exists and can reach the same code as when it ran."""
    return record["case"] in reaches and record.get("reach", "") == reaches[record["case"]]


def _parsed(line: str) -> Any:
    """A line's value; None for one that was cut off when the process ended."""
    try:
        return json.loads(line)
    except ValueError:
        return None
