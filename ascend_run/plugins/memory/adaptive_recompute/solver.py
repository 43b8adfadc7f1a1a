"""Choose what each layer recomputes: the least time within a number of bytes. No torch.

A multiple-choice knapsack, by dynamic programming over sums of costs, which are small integers: for
each sum it keeps the least bytes, unless a smaller sum takes no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs


@attrs.frozen
class Choice:
    """What one layer may recompute."""

    parts: tuple[str, ...]  #: Parts of the layer; ``("",)`` is the layer itself.
    nbytes: int  #: What the layer then keeps for backward. Unit: bytes.
    cost: int  #: Time of the recomputation, in any unit.


@attrs.frozen
class Kind:
    """Layers with the same choices."""

    choices: tuple[Choice, ...]
    layers: int  #: Number of them.


def words_for(parts: Sequence[str]) -> str:
    """Return what is recomputed, in words."""
    return " + ".join(part or "layer" for part in parts) or "nothing"


def useful(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices that no other one beats in both bytes and cost, the cheapest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.cost, c.nbytes, len(c.parts), c.parts)):
        if not found or choice.nbytes < found[-1].nbytes:
            found.append(choice)
    return tuple(found)


def smallest(kinds: Sequence[Kind]) -> int:
    """Return the least bytes that any choices of all layers take."""
    return sum(kind.layers * min(c.nbytes for c in kind.choices) for kind in kinds)


def solve(kinds: Sequence[Kind], budget: int) -> list[tuple[Choice, ...]] | None:
    """Return for each kind the choices of its layers, the most expensive first, which together cost
    least within the budget, and of these take the fewest bytes; None if none are within it."""
    fronts: list[dict[int, int]] = [{0: 0}]  # sum of costs -> least bytes, in order of costs
    options = [useful(kind.choices) for kind in kinds for _ in range(kind.layers)]
    rest = smallest(kinds)
    if rest > budget:
        return None
    for choices in options:
        rest -= choices[-1].nbytes
        sums: dict[int, int] = {}
        for cost, nbytes in fronts[-1].items():
            for choice in choices:
                total, at = nbytes + choice.nbytes, cost + choice.cost
                if total + rest <= budget and total < sums.get(at, total + 1):
                    sums[at] = total
        fronts.append(_decreasing(sums))
    cost = min(fronts[-1])
    chosen: list[Choice] = []
    for choices, before, after in reversed([*zip(options, fronts, fronts[1:], strict=False)]):
        least = after[cost]
        one = next(c for c in choices if before.get(cost - c.cost) == least - c.nbytes)
        chosen.append(one)
        cost -= one.cost
    layers = reversed(chosen)
    return [
        tuple(sorted((next(layers) for _ in range(kind.layers)), key=lambda c: -c.cost))
        for kind in kinds
    ]


def _decreasing(sums: dict[int, int]) -> dict[int, int]:
    """Leave out sums of costs that take no fewer bytes than a smaller one."""
    found: dict[int, int] = {}
    least: int | None = None
    for cost in sorted(sums):
        if least is None or sums[cost] < least:
            least = found[cost] = sums[cost]
    return found
