"""Find the answer in a generated text, without knowing the expected one. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

import attrs

_SAID: Final = (
    r"(?:answer(?:\s+option)?\s*(?:is:?|:)|option\s+is"
    r"|答案(?:选项)?(?:应该?)?[是为选]?[\uff1a:\s]*)"
)
_NUMBER: Final = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


@attrs.frozen(kw_only=True)
class Reading:
    """What a text says."""

    answer: str | None  #: None: no answer was found.
    how: str


def read_label(text: str, labels: Sequence[str]) -> Reading:
    """Find one of the labels: at the begin, after "answer is" or "答案是", or the only one named.

    A letter within a word is none, and neither is the article of "A cat".
    """
    one_of = "|".join(map(re.escape, labels))
    flags = re.IGNORECASE if len(labels[0]) > 1 else re.NOFLAG
    named = rf"[(*]*(?P<label>{one_of})(?![A-Za-z])"
    another = rf"\)?\s*(?:or|and)\s+\(?(?:{one_of})\b"
    first = re.match(
        rf"\s*{named}(?!{another})(?=\s*(?:[).,:;*\uff0c。\uff1a、]|\n|$|is\b|是))", text, flags
    )
    if first:
        return _label(first, labels, "the text begins with it")
    said = [*re.finditer(rf"(?i:{_SAID})\s*(?:\\boxed{{)?{named}", text, flags)]
    if said:
        return _label(said[-1], labels, "the text says that it is the answer")
    alone = [
        *re.finditer(rf"(?<![A-Za-z])\(?(?P<label>{one_of})(?:\)|\.)(?![A-Za-z])", text, flags)
    ]
    if len({match.group("label") for match in alone}) == 1:
        return _label(alone[0], labels, "the text names no other")
    return Reading(answer=None, how="the text names none of the labels, or several")


def _label(match: re.Match[str], labels: Sequence[str], how: str) -> Reading:
    folded = match.group("label").casefold()
    return Reading(answer=next(one for one in labels if one.casefold() == folded), how=how)


def read_labels(text: str, labels: Sequence[str]) -> Reading:
    """Find all letters that a text names: after the last "answer is" or "答案是" in its line, else
    in the whole text; "A, C", "AC" and "(C) and (A)" are the same.

    A letter within a word is none, and neither is the article of "A cat".
    """
    said = [*re.finditer(_SAID, text, re.IGNORECASE)]
    part = text[said[-1].end() :].lstrip().split("\n")[0] if said else text
    letters = "".join(map(re.escape, labels))
    named = rf"(?<![A-Za-z])[{letters}]+(?![A-Za-z])(?!\s+(?!(?:and|or|is|are)\b)[a-z])"
    found = {letter for match in re.findall(named, part) for letter in match}
    if not found:
        return Reading(answer=None, how="the text names none of the labels")
    how = "the labels that the text says are the answer" if said else "the labels of the text"
    return Reading(answer=", ".join(one for one in labels if one in found), how=how)


def read_number(text: str) -> Reading:
    """Find the number after "answer is" or "####", else the last one; commas and $ are dropped."""
    text = text.split("Q:")[0]
    said = [*re.finditer(r"(?:####|(?i:answer\s+is)|答案是)\s*:?\s*", text)]
    if said and (found := _NUMBER.search(text, said[-1].end())):
        return Reading(answer=_plain(found[0]), how="the number after 'answer is' or '####'")
    if numbers := _NUMBER.findall(text):
        return Reading(answer=_plain(numbers[-1]), how="the last number of the text")
    return Reading(answer=None, how="the text has no number")


def same_number(answer: str, expected: str) -> bool:
    """Whether two numbers are equal: 72 and 72.0 are."""
    return Decimal(answer) == Decimal(expected)


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def read_phrase(text: str) -> Reading:
    """Find the words after the last "answer is", else the first line."""
    text = text.split("\nQ:")[0]
    before, said, after = text.rpartition("answer is")
    line = next(iter((after if said else before or text).strip().splitlines()), "")
    phrase = line.lstrip(" *$").rstrip(" *$.")
    how = "the words after 'answer is'" if said else "the first line of the text"
    if not phrase:
        return Reading(answer=None, how="the text is empty")
    return Reading(answer=phrase, how=how)


def same_phrase(answer: str, expected: str) -> bool:
    """Whether two phrases differ by case, spaces and $ only."""
    return _folded(answer) == _folded(expected)


def _folded(phrase: str) -> str:
    return "".join(phrase.replace("$", "").split()).casefold()
