"""The chunks in which tokens are exchanged, and what refuses them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from ascend_run.types.forward import LinkPlace


def chunk_sizes(number: int, num_chunks: int) -> list[int]:
    """Return how many of a number are in each chunk; they differ by at most one."""
    bounds = [at * number // num_chunks for at in range(num_chunks + 1)]
    return [end - start for start, end in pairwise(bounds)]


def chunk_problems(
    option: str, chunks: int, most: tuple[int, str], links: Mapping[str, LinkPlace | None]
) -> Iterator[str]:
    """Yield why a rank's experts cannot be computed in so many chunks.

    Args:
        option: Its key.
        most: How many there can be, and of what.
        links: Name of each plugin -> where it links the forward of the experts, if it does.
    """
    number, units = most
    if chunks > number:
        yield f"{option}={chunks} is more than the {number} {units}; use at most {number}"
    # What wraps the forward of the experts takes all rows of a rank in one call.
    if whole := [name for name, place in links.items() if place is LinkPlace.AROUND]:
        yield (
            f"{option}={chunks} computes a rank's experts in several calls, and "
            f"{' and '.join(whole)} expect one; set it to 1, or leave them out"
        )
