"""The order of queries, keys and values in checkpoints of Megatron before version 2.0."""

from __future__ import annotations

from torch import Tensor

from ascend_run.core.hugging_face.derived_fields import model_value
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.types.config import RunConfig

# n = heads of a shard, d = head size, H = hidden size

FIRST_ORDERED: float = 2.0
"""First version in which each head's query, key and value are consecutive."""


def require_plain_heads(version: float, config: RunConfig) -> None:
    """Check that the model is one that these versions could store.

    Raises:
        CheckpointError: Heads share keys and values.
    """
    heads = config.model.num_attention_heads
    if config.model.multi_latent_attention or model_value(config, "num_query_groups") != heads:
        raise CheckpointError(
            f"the files have checkpoint_version {version} (0 if they do not say), whose heads have "
            "a key and a value each; this model's heads share them"
        )


def in_current_order(tensor: Tensor, version: float, config: RunConfig) -> Tensor:
    """Return a shard of a fused projection in the order of version 2.0, [n, 3, d].

    Args:
        tensor: [n * 3 * d, H], or [n * 3 * d] of the bias. Version 0: [3, n, d]; 1.0: [n, d, 3].
        version: Of the checkpoint.

    Source: ``fix_query_key_value_ordering`` of Megatron-LM.
    """
    width = model_value(config, "kv_channels")
    if version == 0:
        return tensor.reshape(3, -1, width, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)
    return tensor.reshape(-1, width, 3, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
