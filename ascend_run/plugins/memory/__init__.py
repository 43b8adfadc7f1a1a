"""Placement of activations that are saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import (
    ActivationTreatment,
    Condition,
    Forward,
    ForwardLink,
    Keeping,
    Layout,
    PipelineStage,
    RunConfig,
    StorageError,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ascend_run.ops.recompute_ahead.engine import RecomputeAhead
    from ascend_run.ops.recomputed import RandomState

MIB: Final = 1 << 20
"""Bytes; the unit of options that end in ``_mb``."""
IN_ONE_CHUNK: Final = Condition(
    "parallel.virtual_pipeline_model_parallel_size",
    "<=",
    1,
    why="the schedule is not interleaved",
    fix="set parallel.virtual_pipeline_model_parallel_size",
)
"""Under which nothing can be recomputed ahead of its backward."""


@attrs.define(eq=False)
class Recomputation:
    """How a layer, or a part of one, is recomputed; what is inside of it may read and change it."""

    repeats: bool = False  #: Whether the forward that runs now is the one repeated in backward.
    in_blocks: bool = False
    """Whether its own forward calls ``repeated_later`` for its blocks, one after the other."""
    ahead: RecomputeAhead | None = None
    """Recomputes it before its backward, and may have a forward keep everything instead."""


def recomputation_of(module: nn.Module) -> Recomputation | None:
    """Return how a layer or a part of one is recomputed, by ``recomputed``; None if it is not."""
    found: Recomputation | None = getattr(module, "recomputation", None)
    return found


def is_among_first(count: int | None, place: int, chunk: int, num_chunks: int) -> bool:
    """Return whether a layer is one of the first of its pipeline rank: the first of every chunk,
    then the second of every chunk, and so on.

    Args:
        count: Layers of a rank; None, or more than the rank has: all.
        place, chunk, num_chunks: See ``ascend_activation_policy``.
    """
    return count is None or place * num_chunks + chunk < count


def in_mib(nbytes: float) -> str:
    """Return a number of bytes as an option in MiB takes it."""
    return f"{nbytes / MIB:.6g}"


def in_flight(config: RunConfig, layout: Layout, rank: PipelineStage) -> float:
    """Return how many forwards of each layer wait for their backward at the same time, on the mean
    over chunks."""
    chunks, behind = layout.vpp or 1, layout.pp - rank.pp_rank - 1
    if layout.vpp is None:
        return min(rank.num_microbatches, behind + 1)
    group = config.parallel.microbatch_group_size_per_vp_stage or layout.pp
    started = behind * 2 + (chunks - 1) * group + 1
    return min(rank.num_microbatches * chunks, started) / chunks


def some_of(
    names: Sequence[str],
) -> Callable[[object, attrs.Attribute[Any], tuple[str, ...]], None]:
    """Return a validator of an option that names some of these, each once."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
        unknown = [name for name in value if name not in names]
        if unknown or not value or len({*value}) < len(value):
            raise ValueError(
                f"{attribute.name} must name some of {', '.join(map(repr, names))}, each once, got "
                f"{', '.join(value) or 'none'}"
            )

    return check


def no_file(plugin: str, folder: str, error: OSError, nbytes: int) -> StorageError:
    """Return the error of a plugin whose folder takes no new file."""
    return StorageError(
        f"{plugin}: plugins.{plugin}.folder={folder}: no file of {nbytes} bytes: {error.strerror}; "
        "name a folder on a disk with room for all that the plugin keeps there"
    )


def warn_that_nothing_is_saved(plugin: str, why: str) -> None:
    """Log that what a plugin moves takes the memory that it frees; not if there is no reason."""
    if why:
        import structlog

        structlog.get_logger().warning("plugin.saves_nothing", plugin=plugin, why=why)


def recomputed(ahead: Callable[[], RecomputeAhead] | None = None) -> ActivationTreatment:
    """Return the recomputation of parts of a layer, from the hidden state that they take, by
    Megatron's checkpoint: it restores the random generators of every parallel rank.

    Args:
        ahead: Returns what recomputes them before their backward, in place of the checkpoint.
    """
    return ActivationTreatment(Keeping.RECOMPUTE, partial(_recompute_links, ahead))


def discarded(readers: Mapping[str, str]) -> ActivationTreatment:
    """Return the discarding of the outputs of parts, by Megatron's CheckpointWithoutOutput: an
    output's storage is emptied after the module that reads it, and filled again when the gradient
    of that module's output arrives.

    Args:
        readers: Part -> the module that reads its output; nothing else may read it.
    """
    return ActivationTreatment(Keeping.DISCARD, partial(_discard_links, readers))


def _recompute_links(
    ahead: Callable[[], RecomputeAhead] | None, layer: Any, parts: Sequence[str], device: object
) -> dict[str, ForwardLink]:
    links = {}
    for part in parts:
        module = layer.get_submodule(part)
        module.recomputation = how = Recomputation(ahead=ahead() if ahead else None)
        links[part] = ForwardLink(wrap=partial(recomputing, how=how), compilable=False)
    return links


def recomputing(inner: Forward, how: Recomputation | None = None) -> Forward:
    """Return the forward that saves its input only, and is repeated in backward."""
    own = how or Recomputation()

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if own.in_blocks:
            return inner(hidden_states, *args, **kwargs)
        return repeated_later(own, lambda x: inner(x, *args, **kwargs), hidden_states)

    return forward


def repeated_later(how: Recomputation, forward: Forward, hidden_states: Tensor) -> Any:
    """Call a forward of which only the input is saved, and which backward repeats.

    Args:
        forward: Takes the hidden states; of several outputs, only the first one has a gradient.
    """
    import torch
    from megatron.core.tensor_parallel import checkpoint

    ahead = how.ahead
    is_saved = torch.is_grad_enabled() and hidden_states.requires_grad
    if not is_saved or (ahead is not None and ahead.keeps):
        return forward(hidden_states)
    more: tuple[Any, ...] = ()

    def run(x: Tensor) -> Any:
        nonlocal more
        how.repeats = torch.is_grad_enabled()  # Megatron's first call is without
        try:
            out = forward(x)
        finally:
            how.repeats = False
        if not isinstance(out, tuple):
            return out
        more = out[1:]  # a bias, which is a parameter, or None
        return out[0]

    first = (
        ahead.saving_input(how, run, hidden_states)
        if ahead
        else checkpoint(run, False, hidden_states)
    )
    return (first, *more) if more else first


def overlapped_sends(config: RunConfig) -> Mapping[str, object]:
    """Return defaults under which the schedule of a virtual pipeline lets others wait for it."""
    if IN_ONE_CHUNK.holds(config):
        return {}
    return {"parallel.overlap_p2p_comm": True, "parallel.batch_p2p_comm": False}


def problems_of_sends(plugin: str, config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield a message for each option under which nothing can be recomputed ahead of its backward,
    as ``overlapped_sends`` would have it."""
    if IN_ONE_CHUNK.holds(config):
        if layout.vpp is not None:
            yield (
                f"{plugin}: model.pipeline_model_parallel_layout lists {layout.vpp} chunks for "
                f"each rank; set {IN_ONE_CHUNK.field}={layout.vpp} beside it"
            )
        return
    if config.platform == "cpu" and config.parallel.deallocate_pipeline_outputs:
        yield (
            f"{plugin}: parallel.deallocate_pipeline_outputs=true frees outputs that gloo is still "
            "sending, as sends are overlapped; expected false on platform cpu: leave it out"
        )
    for key, wanted in overlapped_sends(config).items():
        given = getattr(config.parallel, key.removeprefix("parallel."))
        if given is not wanted:
            yield (
                f"{plugin}: with {key}={str(given).lower()} nothing can be recomputed between a "
                f"receive and the wait for it; leave out {key}"
            )


def _discard_links(
    readers: Mapping[str, str], layer: Any, parts: Sequence[str], device: object
) -> dict[str, ForwardLink]:
    links = {}
    for part in parts:
        waiting: list[Any] = []
        links[part] = ForwardLink(wrap=partial(discarding, waiting), compilable=False)
        links[readers[part]] = ForwardLink(wrap=partial(reading, waiting), compilable=False)
    return links


def discarding(waiting: list[Any], inner: Forward) -> Forward:
    import torch
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    def forward(x: Tensor) -> Tensor:
        waiting.clear()
        if not (torch.is_grad_enabled() and x.requires_grad):
            return inner(x)  # type: ignore[no-any-return]
        checkpoint = CheckpointWithoutOutput(fp8=None)
        out: Tensor = checkpoint.checkpoint(inner, x)
        waiting.append(checkpoint)
        mark(out, ascend_discarded=True)  # so that no other plugin moves its storage
        return out

    return forward


def reading(waiting: list[Any], inner: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            out = inner(*args, **kwargs)
        except Exception:
            waiting.clear()  # it would hold the graph of a step that failed
            raise
        if waiting:
            first = out[0] if isinstance(out, tuple) else out
            waiting.pop().discard_output_and_register_recompute(first)
        return out

    return forward


def random_state() -> RandomState:
    """Return a context with the present state of all random generators, those of the parallel ranks
    included; after it they have the state of before it."""
    # As its checkpoint does: the platform may have replaced these functions.
    from megatron.core.tensor_parallel import random

    earlier = random._get_all_rng_states()

    @contextmanager
    def state() -> Iterator[None]:
        with random._fork_rng():
            random._set_all_rng_states(*earlier)
            yield

    return state
