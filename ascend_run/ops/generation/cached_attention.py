"""Attention to the cached keys and values of a step's sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from ascend_run.types.attention import (
    AttentionKernel,
    AttentionResult,
    AttentionSpec,
    CachedAttentionKernel,
    CachedKeys,
)
from ascend_run.types.forward import Forward, ForwardLink

from .key_value_cache import KeyValueCache, StepPages
from .step import Step

# T tokens of a step, N query heads, G key-value heads, D width of q and k, E width of v, R rows
# whose logits are wanted


@attrs.define(eq=False)
class CachedForward:
    """The cache of a model and the step that runs; shared by the kernels of all layers."""

    cache: KeyValueCache | None = None
    step: Step | None = None
    pages: StepPages | None = None  #: Of the step, once a layer has asked for them.
    output: Callable[[Tensor], Tensor] | None = None
    """Computes the output layer in place of its module; None: the module does."""

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Compute the tokens of a step: within, every forward of the model is of this step."""
        assert self.cache is not None, "a step needs a cache"
        assert self.step is None, "a step within a step"
        self.step = step
        try:
            yield
        finally:
            self.step = self.pages = None

    def write(self, layer_index: int, k_TGD: Tensor, v_TGE: Tensor) -> CachedKeys:
        """Write the keys and values of the step's tokens; return the pages with them."""
        assert self.cache is not None, "a step needs a cache"
        assert self.step is not None, "no step runs"
        if self.pages is None:
            self.pages = self.cache.place(self.step)
        return self.cache.write(layer_index, self.pages, k_TGD, v_TGE)


class CachedAttention(AttentionKernel[Any]):
    """Attends to cached keys while a step runs; otherwise it is the kernel inside it.

    Args:
        step_kernel: Computes steps in place of the inner kernel, which may expect a shard of the
            sequence on each rank.
    """

    def __init__(
        self,
        inner: AttentionKernel[Any],
        layer_index: int,
        forward: CachedForward,
        step_kernel: AttentionKernel[Any] | None = None,
    ) -> None:
        self.inner, self.layer_index, self.state = inner, layer_index, forward
        self.features, self.backward_reads = inner.features, inner.backward_reads
        self._step_kernel = step_kernel or inner
        self._reads_pages = self._step_kernel.features.cached

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult[Any]:
        """With a step: [T, 1, N, D], [T, 1, G, D], [T, 1, G, E] -> out [T, 1, N, E], and no lse.

        Raises:
            ValueError: The batch has a bias or documents, which a step cannot have.
        """
        if self.state.step is None:
            return self.inner.forward(q, k, v, spec)
        if spec.bias is not None or spec.mask.document_ends is not None:
            raise ValueError("attention to cached keys takes neither a bias nor documents")
        out = self.of_step(q.squeeze(1), k.squeeze(1), v.squeeze(1), spec).unsqueeze(1)
        return AttentionResult(out, q.new_empty(0))

    def of_step(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute the attention of the step that runs, [T, N, D], [T, G, D], [T, G, E] ->
        [T, N, E]; 0 of tokens after those of its sequences, which fill up the row."""
        assert self.state.step is not None
        count = sum(part.count for part in self.state.step.parts)
        if count == len(q):
            return self._of_parts(q, k, v, spec)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        if count:
            out[:count] = self._of_parts(q[:count], k[:count], v[:count], spec)
        return out

    def _of_parts(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        step, cache = self.state.step, self.state.cache
        assert step is not None
        assert cache is not None
        if self._reads_pages:
            keys = self.state.write(self.layer_index, k, v)
            return cast("CachedAttentionKernel[Any]", self._step_kernel).forward_cached(
                q, keys, spec
            )
        found = []
        for part in step.parts:
            keys_LGD, values_LGE = cache.append(self.layer_index, part, k[part.rows], v[part.rows])
            one = attrs.evolve(spec, mask=attrs.evolve(spec.mask, query_start=part.start))
            arguments = (q[part.rows, None], keys_LGD[:, None], values_LGE[:, None], one)
            found.append(self._step_kernel.forward(*arguments).out.squeeze(1))
        return torch.cat(found)

    def backward(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Compute the gradients of a forward without a step."""
        if self.state.step is not None:
            raise RuntimeError("attention to cached keys has no backward")
        return self.inner.backward(*arguments, **options)


def selected_rows(forward: CachedForward) -> Callable[[nn.Module], ForwardLink]:
    """Return a link of the output layer: of a step, the logits of the wanted rows alone.

    With sequence parallelism a rank has a share of the tokens, which the layer itself gathers: so
    all logits are computed there before the rows are selected.
    """

    def of_module(module: nn.Module) -> ForwardLink:
        gathers = getattr(module, "sequence_parallel", False)

        def wrap(inner: Forward) -> Forward:
            def of_rows(hidden_T1H: Tensor, *arguments: Any, **options: Any) -> Any:
                if gathers and forward.step is not None:
                    logits_T1V, *rest = inner(hidden_T1H, *arguments, **options)
                    return (logits_T1V.index_select(0, forward.step.rows_R), *rest)
                if forward.step is not None:
                    hidden_T1H = hidden_T1H.index_select(0, forward.step.rows_R)
                if forward.output is not None:
                    return forward.output(hidden_T1H), None
                return inner(hidden_T1H, *arguments, **options)

            return of_rows

        return ForwardLink(wrap=wrap, compilable=False)

    return of_module
