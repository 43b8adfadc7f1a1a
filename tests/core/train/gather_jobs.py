"""What a rank of the pool sees of parameters that are gathered while the model computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.support.small_runs import Values, training


def output_weight_when_read(values: Values) -> tuple[int, list[bool]]:
    """Train two steps; return how many parameters share the output weight's bucket, and for each
    loss whether the bucket's gather was over when the weight was handed to it."""
    with training(values) as run:
        (chunk,) = run.bundle.chunks
        model: Any = chunk.module
        bucket = chunk.param_to_bucket_group[model.output_layer.weight]
        loss, over = model.loss.from_hidden, []

        def watched(hidden: Tensor, weight: Tensor, *rest: Tensor, **named: Any) -> Tensor:
            over.append(bucket.param_gather_dispatched and bucket.param_gather_handle is None)
            result: Tensor = loss(hidden, weight, *rest, **named)
            return result

        model.loss.from_hidden = watched
        run.step()
        run.step()
        return len(bucket.params), over
