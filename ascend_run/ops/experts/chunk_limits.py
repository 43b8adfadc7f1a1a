"""What refuses the exchange of tokens in chunks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ascend_run.types.forward import LinkPlace


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
