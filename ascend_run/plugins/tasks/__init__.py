"""Training tasks: datasets, batches and the loss; and what those share that predict tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ascend_run.plugin_api import Batch, LossSum

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ascend_run.text.packed_samples import PackedSamples


class SampleTensors:
    """A map-style dataset of packed samples as tensors.

    Args:
        fields: Those of ``PackedSample`` that an item has, by its names.
    """

    def __init__(self, samples: PackedSamples, fields: Collection[str]) -> None:
        self.samples, self._fields = samples, fields

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        import torch

        sample = self.samples[index]
        return {name: torch.from_numpy(getattr(sample, name)) for name in self._fields}


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor | LossSum:
    """Return the hidden state [S, B, H]; on the last pipeline stage, the sum of the losses of the
    tokens that ``loss_mask`` selects, and their number."""
    import torch

    tensors = batch.tensors
    output: Tensor = model(
        input_ids=tensors["tokens"],
        position_ids=tensors["position_ids"],
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        attention_mask=tensors.get("attention_mask"),
        document_ends=batch.document_ends,
    )
    if output.dim():  # only the last stage reduces to a scalar
        return output
    return LossSum(output, tensors["loss_mask"].sum(dtype=torch.int64))
