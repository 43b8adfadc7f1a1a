"""Check the options of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.types.config import RunConfig


def multi_token_problems(config: RunConfig) -> Iterator[str]:
    """Yield what the layers of multi-token prediction cannot do."""
    model, pp = config.model, config.parallel.pipeline_model_parallel_size
    depths, tp = model.mtp_num_layers, config.parallel.tensor_model_parallel_size
    option = f"model.mtp_num_layers={depths}"
    if depths and depths >= config.data.seq_length:
        yield f"{option} must be below data.seq_length={config.data.seq_length}"
    if depths and model.hidden_size % tp:
        yield f"{option} needs model.hidden_size to be a multiple of the {tp} tensor-parallel ranks"
    if depths and pp > 1:
        table = model.position_embedding_type == "learned_absolute"
        norm = model.embedding_layernorm and "model.embedding_layernorm=true"
        listed = model.pipeline_model_parallel_layout and "model.pipeline_model_parallel_layout"
        for other in (table and "model.position_embedding_type=learned_absolute", norm, listed):
            if other:
                reason = f"with parallel.pipeline_model_parallel_size={pp}"
                yield f"{option} does not go with {other} {reason}; leave one of them out"
