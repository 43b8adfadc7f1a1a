"""Links of a mixture-of-experts layer that recompute what its experts would save.

With the tokens dropped too, they are dispatched again: the layer is repeated from its dispatcher
on, with the routing that it had, up to the last tensor that its experts save. Neither the router
nor the last matmul (unless it is one operation with the rest) nor the combination is repeated.
"""

# T tokens sent to this rank's experts, H hidden size

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

from ascend_run.ops.recomputed import Collect, RandomState, RecomputedForward, repeat_forward
from ascend_run.types.forward import Forward, ForwardLink

_SHARED: Final = "shared_experts"


class Saves(enum.Enum):
    """What the experts save."""

    ALL = enum.auto()
    """What their computation needs; nothing is recomputed."""
    TOKENS = enum.auto()
    """The tokens sent to them, from which the rest is recomputed on this rank alone."""
    NOTHING = enum.auto()
    """The layer's input, which its router saves anyway, is dispatched again: by all ranks that
    exchange tokens, so that they must choose alike."""


@attrs.define
class _Call:
    """A forward of the layer."""

    layer: Callable[[], object]
    """Repeats it."""
    num_tokens: int
    """Of this rank, in the layer's input."""
    routing: Any = None
    """What the router returned, detached."""


class MoeRecompute:
    """The recomputation of one layer.

    Args:
        choose: Returns what the experts save, from the number of tokens of each expert on this rank
            and the number of this rank's tokens in the layer's input; called in each forward that
            takes gradients.
        random_state: Returns the present state of the random generators.
        shared: Whether what the shared experts would save is recomputed as well.
    """

    def __init__(
        self,
        module: nn.Module,
        choose: Callable[[Tensor, int], Saves],
        random_state: Callable[[], RandomState],
        *,
        shared: bool,
    ) -> None:
        self._module, self._choose, self._random_state = module, choose, random_state
        self._shared = shared
        self._call: _Call | None = None
        self._repeated: tuple[_Call, Callable[..., None]] | None = None
        """The forward that is being repeated, and what its experts do then."""

    def links(self) -> dict[str, ForwardLink]:
        """Return the links around the layer and its submodules, by name."""
        wraps = {"": self._layer, "router": self._router, "experts": self._experts}
        if getattr(self._module, _SHARED, None) is not None:
            wraps[_SHARED] = self._shared_experts
        return {name: ForwardLink(wrap=wrap, compilable=False) for name, wrap in wraps.items()}

    def _layer(self, inner: Forward) -> Forward:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(hidden, *args, **kwargs)
            repeat = partial(inner, hidden.detach(), *args, **kwargs)
            self._call = _Call(repeat, hidden.shape[:-1].numel())
            try:
                return inner(hidden, *args, **kwargs)
            finally:
                self._call = None

        return forward

    def _router(self, inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._repeated is not None:
                return self._repeated[0].routing
            out = inner(*args, **kwargs)
            if self._call is not None:
                self._call.routing = tuple(tensor.detach() for tensor in out)
            return out

        return forward

    def _experts(self, inner: Forward) -> Forward:
        def forward(tokens_TH: Tensor, counts: Tensor, probs_T: Tensor) -> Any:
            if self._repeated is not None:
                return self._repeated[1](tokens_TH, probs_T)
            call = self._call
            saves = Saves.ALL if call is None else self._choose(counts, call.num_tokens)
            if call is None or saves is Saves.ALL:
                return inner(tokens_TH, counts, probs_T)
            again = partial(
                repeat_forward,
                lambda tokens, probs: inner(tokens, counts, probs),
                self._random_state(),
            )
            required = tokens_TH.requires_grad, probs_T.requires_grad
            if saves is Saves.TOKENS:
                tensors = (tokens_TH.detach(), required[0]), (probs_T.detach(), required[1])
                stays = [tokens_TH, *self._module.parameters()]
                recomputed = RecomputedForward(partial(again, tensors), stays)
            else:
                dispatch = partial(self._dispatch_again, call, again, required)
                recomputed = RecomputedForward(dispatch, self._module.parameters())
            with recomputed.saving():
                out, bias = inner(tokens_TH, counts, probs_T)
            _restore_before(out, recomputed)
            return out, bias

        return forward

    def _dispatch_again(
        self, call: _Call, again: Callable[..., None], required: tuple[bool, bool], collect: Collect
    ) -> None:
        def experts(*tensors: Tensor) -> None:
            again(tuple(zip(tensors, required, strict=True)), collect)

        self._repeated = call, experts
        try:
            with torch.no_grad():
                call.layer()
        finally:
            self._repeated = None

    def _shared_experts(self, inner: Forward) -> Forward:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._repeated is not None:
                return hidden  # never read: the repeated forward ends before
            if self._call is None or not self._shared:
                return inner(hidden, *args, **kwargs)
            tensors = ((hidden.detach(), hidden.requires_grad),)
            again = partial(
                repeat_forward,
                lambda x: inner(x, *args, **kwargs),
                self._random_state(),
                tensors,
            )
            recomputed = RecomputedForward(again, [hidden, *self._module.parameters()])
            with recomputed.saving():
                out = inner(hidden, *args, **kwargs)
            _restore_before(out, recomputed)
            return out

        return forward


def _restore_before(out: Tensor, recomputed: RecomputedForward) -> None:
    """Repeat the forward when the gradient of its output arrives: at the same point of backward on
    every rank, whatever this rank's share of the tokens."""
    if out.requires_grad:
        out.register_hook(recomputed.restore)
