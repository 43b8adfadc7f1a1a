"""How long rows may be, and the documents in them: a model's positions count within a document."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.plugin_api import RunConfig

_BY_LENGTH = ("dynamic", "longrope")
"""RoPE scalings whose angles depend on the length of a row."""


def longest_document(config: RunConfig) -> int:
    """Return the most positions that a document may take in a row of ``data.seq_length``."""
    longest: int | None = config.model.max_position_embeddings
    if longest is None or config.model.rope_scaling_type == "dynamic":
        return config.data.seq_length
    return min(longest, config.data.seq_length)


def length_problems(
    task: str, config: RunConfig, *, packs: bool, can_unpack: bool = True
) -> Iterator[str]:
    """Yield the problem of rows that are longer than the model's positions.

    RoPE is not restarted in a document, but its products depend on distances alone. Learned
    positions are numbered from 0 in each document, and padding continues the last one to the end
    of the row.

    Args:
        packs: Whether a row holds several documents, which are kept apart.
        can_unpack: Whether ``plugins.TASK.packing=false`` gives each document a row.
    """
    model, length = config.model, config.data.seq_length
    longest = model.max_position_embeddings or length
    scaling = model.rope_scaling_type
    unpacked = f", or plugins.{task}.packing=false" if can_unpack else ""
    if packs and scaling in _BY_LENGTH:
        if scaling == "longrope":
            longest = model.rope_scaling_original_max_position_embeddings or longest
        if length > longest:
            yield (
                f"{task}: model.rope_scaling_type={scaling} turns every token of a row of more "
                f"than {longest} tokens otherwise, and a row of data.seq_length={length} holds "
                f"several documents, which may be shorter; use data.seq_length={longest} or less"
                f"{unpacked}"
            )
    elif length <= longest or scaling == "dynamic":
        return
    elif model.position_embedding_type == "learned_absolute":
        yield (
            f"{task}: data.seq_length={length} is more than model.max_position_embeddings="
            f"{longest}, the number of learned positions, which padding takes too; use at most "
            f"{longest}"
        )
    elif not packs:
        yield (
            f"{task}: data.seq_length={length} is more than model.max_position_embeddings="
            f"{longest}; use at most {longest}, or plugins.{task}.packing=true, since only "
            "documents are limited then"
        )
