"""Answers by beam search, in the order of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.ops.generation.beam_engine import BeamEngine, Found, pages_of
from ascend_run.ops.generation.beams import BeamSearch
from ascend_run.ops.generation.engine import Request

from .model import GenerationModel

_MAX_BEAMS: Final = 16
"""Of all searches that run together; a search with more runs alone."""
_PAGE_SIZE: Final = 16


def searched(
    model: GenerationModel, requests: Sequence[Request], search: BeamSearch
) -> Iterator[Found]:
    """Search for the most probable answer to each request."""
    pages = sorted((pages_of(one, search, _PAGE_SIZE) for one in requests), reverse=True)
    num_together = max(1, _MAX_BEAMS // search.num_beams)
    cache = model.with_cache(_PAGE_SIZE * sum(pages[:num_together]))
    engine = BeamEngine(model.logits, cache, search)
    numbers = [engine.submit(request) for request in requests]
    found: dict[int, Found] = {}
    for number in numbers:
        while number not in found:
            found |= {one.number: one for one in engine.step()}
        yield found.pop(number)
