"""Attention to the cached keys and values of a step's sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor, nn

from ascend_run.types.attention import AttentionKernel, AttentionResult, AttentionSpec
from ascend_run.types.forward import Forward, ForwardLink

from .key_value_cache import KeyValueCache
from .step import Step

# T tokens of a step, N query heads, G key-value heads, D width of q and k, E width of v, R rows
# whose logits are wanted


@attrs.define(eq=False)
class CachedForward:
    """The cache of a model and the step that runs; shared by the kernels of all layers."""

    cache: KeyValueCache | None = None
    step: Step | None = None

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Compute the tokens of a step: within, every forward of the model is of this step."""
        assert self.cache is not None, "a step needs a cache"
        assert self.step is None, "a step within a step"
        self.step = step
        try:
            yield
        finally:
            self.step = None


class CachedAttention(AttentionKernel[Any]):
    """Attends to cached keys while a step runs; otherwise it is the kernel inside it."""

    def __init__(
        self, inner: AttentionKernel[Any], layer_index: int, forward: CachedForward
    ) -> None:
        self.inner, self.layer_index, self.state = inner, layer_index, forward
        self.features, self.backward_reads = inner.features, inner.backward_reads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult[Any]:
        """With a step: [T, 1, N, D], [T, 1, G, D], [T, 1, G, E] -> out [T, 1, N, E], and no lse.

        Raises:
            ValueError: The batch has a bias or documents, which a step cannot have.
        """
        step, cache = self.state.step, self.state.cache
        if step is None or cache is None:
            return self.inner.forward(q, k, v, spec)
        if spec.bias is not None or spec.mask.document_ends is not None:
            raise ValueError("attention to cached keys takes neither a bias nor documents")
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for part in step.parts:
            keys, values = cache.append(self.layer_index, part, k[part.rows, 0], v[part.rows, 0])
            one = attrs.evolve(spec, mask=attrs.evolve(spec.mask, query_start=part.start))
            arguments = (q[part.rows], keys.unsqueeze(1), values.unsqueeze(1), one)
            out[part.rows] = self.inner.forward(*arguments).out
        return AttentionResult(out, q.new_empty(0))

    def backward(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Compute the gradients of a forward without a step."""
        if self.state.step is not None:
            raise RuntimeError("attention to cached keys has no backward")
        return self.inner.backward(*arguments, **options)


def selected_rows(forward: CachedForward) -> Callable[[nn.Module], ForwardLink]:
    """Return a link of the output layer: of a step, the logits of the wanted rows alone."""

    def wrap(inner: Forward) -> Forward:
        def of_rows(hidden_T1H: Tensor, *arguments: Any, **options: Any) -> Any:
            if forward.step is not None:
                hidden_T1H = hidden_T1H.index_select(0, forward.step.rows_R)
            return inner(hidden_T1H, *arguments, **options)

        return of_rows

    return lambda module: ForwardLink(wrap=wrap, compilable=False)
