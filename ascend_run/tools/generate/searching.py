"""Answers by beam search, in the order of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.ops.generation.beam_engine import BeamEngine, Found, pages_of
from ascend_run.ops.generation.beams import BeamSearch
from ascend_run.ops.generation.engine import Request
from ascend_run.plugin_api.errors import ConfigError

from .model import GenerationModel

_MAX_BEAMS: Final = 16
"""Of all searches that run together; a search with more runs alone."""
_PAGE_SIZE: Final = 16


def searched_tokens(requests: Sequence[Request], search: BeamSearch) -> int:
    """Return the tokens of the cache for the largest searches that run together."""
    pages = sorted((pages_of(one, search, _PAGE_SIZE) for one in requests), reverse=True)
    return _PAGE_SIZE * sum(pages[: max(1, _MAX_BEAMS // search.num_beams)])


def searched(
    model: GenerationModel, requests: Sequence[Request], search: BeamSearch
) -> Iterator[Found]:
    """Search for the most probable answer to each request.

    Raises:
        ConfigError: Beams of this model would have to be recomputed when they get longer.
    """
    if (boundary := model.lengths.restarts_above) is not None:
        raise ConfigError(
            f"--num-beams {search.num_beams}: the RoPE scaling of this model "
            f"({model.config.model.rope_scaling_type}) has other angles for texts above {boundary} "
            "tokens, and beams are not recomputed; give all texts the same angles with "
            f"--rope-length N, at most {model.max_length}, or leave out --num-beams"
        )
    engine = BeamEngine(model.logits, model.with_cache(searched_tokens(requests, search)), search)
    numbers = [engine.submit(request) for request in requests]
    found: dict[int, Found] = {}
    for number in numbers:
        while number not in found:
            found |= {one.number: one for one in engine.step()}
        yield found.pop(number)
