"""The terms of a run's loss: the value and the gradients of each.

The loss that a run reports is that of the task. Routers add their auxiliary losses in backward, by
Megatron's ``MoEAuxLossAutoScaler``, and the losses of multi-token prediction are added with the
value 0: both change gradients, but not the reported loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ascend_run.core.checkpoint.entries import RandomState
from ascend_run.core.model.router import Router
from ascend_run.core.train.step import ForwardBackward
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.dry_run import DryRun, gradient_of

MAIN: Final = "the main loss"
ROUTER: Final = "the router's auxiliary loss"
BALANCE: Final = "the router's balancing loss"
Z_LOSS: Final = "the router's z-loss"
AHEAD: Final = "the loss of multi-token prediction"
AUXILIARY: Final = (ROUTER, BALANCE, Z_LOSS)
_BALANCE: Final = "moe_aux_loss_coeff"
_Z: Final = "moe_z_loss_coeff"
_AHEAD: Final = "mtp_loss_scaling_factor"

Gradients = list[Tensor | None]
"""Of every parameter shard, in the order of ``DryRun.shards``."""


class LossTerms:
    """The terms of the loss on fixed micro-batches, on one rank.

    Args:
        dry_run: Built for gradients.
        batches: The micro-batches.
    """

    def __init__(
        self, dry_run: DryRun, forward_backward: ForwardBackward, batches: Sequence[c.Batch]
    ) -> None:
        self._dry_run, self._forward_backward = dry_run, forward_backward
        self._batches = tuple(batches)
        self._random = RandomState(tracker=get_cuda_rng_tracker())
        self._draws = self._random.state_dict()
        chunks = dry_run.bundle.chunks
        # Megatron's DistributedDataParallel has another attribute named "buffers".
        self._buffers = [(b, b.clone()) for chunk in chunks for _, b in chunk.named_buffers()]
        modules = [module for chunk in chunks for module in chunk.modules()]
        configs = (getattr(module, "config", None) for module in modules)
        self._configs = list(
            {id(x): x for x in configs if isinstance(x, TransformerConfig)}.values()
        )
        self._sparse_mixers = [
            module
            for module in modules
            if isinstance(module, Router) and module.sparsemixer_eps is not None
        ]
        self._depth_losses: list[Callable[[], Tensor | None]] = [
            cast("Any", m).take_mtp_losses for m in modules if hasattr(m, "take_mtp_losses")
        ]
        with _router_losses() as forward_only:
            _, self.num_tokens = self._run(backward=False)
        with _router_losses() as seen:
            self._run(backward=True)
        # A recomputed layer computes its auxiliary losses in backward.
        self._backward = {*seen} != {*forward_only}
        self.names = tuple(self._names(bool(seen)))
        """Terms that are not zero; the main loss first."""
        self._ahead()
        self.sizes = tuple(map(abs, self.values()))
        """Of the terms."""

    @property
    def needs_main(self) -> bool:
        """Whether the main loss reaches every trained parameter that an auxiliary loss reaches: not
        the router of a model whose one selected expert always has the weight 1."""
        return not any(
            getattr(config, "moe_router_topk", 0) == 1
            and config.moe_router_score_function == "softmax"
            and not config.moe_router_pre_softmax
            for config in self._configs
        )

    def values(self) -> tuple[float, ...]:
        """Return the mean of each term over the tokens, in the order of ``names``."""
        with _router_losses() as seen:
            main, count = self._run(self._backward)
        ahead, router = self._ahead() / count, float(sum(seen)) / count
        if Z_LOSS not in self.names:
            return tuple({MAIN: main, AHEAD: ahead, ROUTER: router}[name] for name in self.names)
        with _router_losses() as seen, self._without(_Z):
            self._run(self._backward)
        self._ahead()
        balance = float(sum(seen)) / count
        found = {MAIN: main, AHEAD: ahead, BALANCE: balance, Z_LOSS: router - balance}
        return tuple(found[name] for name in self.names)

    def gradients(self) -> dict[str, Gradients]:
        """Return the gradients of each term alone: those of all terms but the main loss are the
        difference to the gradients of the main loss."""
        found = {MAIN: self.gradients_of_main()}
        for name in self.names[1:]:
            with _router_losses(muted=name == AHEAD), self._only(name):
                found[name] = [*map(_difference, self._gradients(), found[MAIN])]
        return found

    def gradients_of_main(self) -> Gradients:
        """Return the gradients of the main loss alone."""
        with _router_losses(muted=True), self._without(_AHEAD):
            return self._gradients()

    def reached_among_near_experts(self) -> frozenset[int]:
        """Return the indices of the parameter shards to which the main loss gives a gradient if
        SparseMixer counts all experts as near the best; none if no router is SparseMixer's.

        At its own threshold, no other expert may be near the selected ones, of any token. Their
        weights are 1 then, and the router rightly gets no gradient.
        """
        if not self._sparse_mixers:
            return frozenset()
        thresholds = [router.sparsemixer_eps for router in self._sparse_mixers]
        try:
            for router in self._sparse_mixers:
                router.sparsemixer_eps = math.inf
            found = self.gradients_of_main()
        finally:
            for router, eps in zip(self._sparse_mixers, thresholds, strict=True):
                router.sparsemixer_eps = eps
        return frozenset(
            index for index, gradient in enumerate(found) if gradient is not None and gradient.any()
        )

    def _names(self, has_router_losses: bool) -> Iterator[str]:
        yield MAIN
        if has_router_losses:
            both = self._is_set(_BALANCE) and self._is_set(_Z)
            yield from (BALANCE, Z_LOSS) if both else (ROUTER,)
        if self._depth_losses and self._is_set(_AHEAD) and self._is_set("mtp_num_layers"):
            yield AHEAD

    def _is_set(self, field: str) -> bool:
        return any(getattr(config, field, None) for config in self._configs)

    def _run(self, backward: bool) -> tuple[float, int]:
        """Return the mean of the main loss, and the number of tokens."""
        self._random.load_state_dict(self._draws)  # each run drops out the same elements
        for buffer, value in self._buffers:  # a backward changes the bias that balances experts
            buffer.copy_(value)
        for chunk in self._dry_run.bundle.chunks:
            chunk.train()
            cast("Any", chunk).zero_grad_buffer()
        batches = iter(self._batches)
        totals = self._forward_backward(batches, len(self._batches), forward_only=not backward)
        return totals.loss, max(totals.count, 1)

    def _ahead(self) -> float:
        """Sum of the losses of multi-token prediction in the last run, as training weights them."""
        total = 0.0
        for take in self._depth_losses:
            if (losses := take()) is not None:
                factor = self._configs[0].mtp_loss_scaling_factor or 0.0
                total += float(losses[:, 0].sum()) * factor / len(losses)
        return total

    def _gradients(self) -> Gradients:
        self._run(backward=True)
        self._ahead()
        found = self._dry_run.shards(gradient_of)
        return [None if p.tensor is None else p.tensor.detach().clone() for p in found]

    def _only(self, name: str) -> Any:
        others = {BALANCE: (_Z, _AHEAD), Z_LOSS: (_BALANCE, _AHEAD), AHEAD: ()}
        return self._without(*others.get(name, (_AHEAD,)))

    @contextmanager
    def _without(self, *fields: str) -> Iterator[None]:
        """Set coefficients of the model to 0."""
        before = [[getattr(config, field, None) for field in fields] for config in self._configs]
        try:
            for config in self._configs:
                for field in fields:
                    setattr(config, field, 0.0)
            yield
        finally:
            for config, values in zip(self._configs, before, strict=True):
                for field, value in zip(fields, values, strict=True):
                    setattr(config, field, value)


def _difference(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one
    return one - other


@contextmanager
def _router_losses(muted: bool = False) -> Iterator[list[float]]:
    """Record the auxiliary losses that routers add in backward.

    Args:
        muted: Do not add them.
    """
    seen: list[float] = []
    inherited: Callable[..., Tensor] = MoEAuxLossAutoScaler.apply

    def apply(output: Tensor, aux_loss: Tensor) -> Tensor:
        seen.append(float(aux_loss.detach().sum()))
        return output if muted else inherited(output, aux_loss)

    MoEAuxLossAutoScaler.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del MoEAuxLossAutoScaler.apply  # which uncovers the inherited one
