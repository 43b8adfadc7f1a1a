"""Mixture of experts: the computation of the experts on one rank.

Shape letters: see ``ascend_run.plugin_api.contracts``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ExpertWeights(NamedTuple):
    """MLP weights of the experts on this rank."""

    fc1: Tensor  #: [X, 2F, H]: gate rows, then up rows; [X, F, H] if the activation is not gated.
    fc2: Tensor  #: [X, H, F].
    fc1_bias: Tensor | None = None
    """[X, 2F], in the order of fc1's rows; None without biases, as the next one."""
    fc2_bias: Tensor | None = None  #: [X, H].


class ExpertsKernel(Protocol):
    """The MLPs of all local experts, applied to the tokens dispatched to them. One with
    ``accumulate = True`` adds the gradient of a weight that has a ``main_grad`` to that."""

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Any,
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        """Compute ``probs * (act(x @ fc1.T + fc1_bias) @ fc2.T + fc2_bias)`` for each token.

        A token has the weights of its expert.

        Args:
            tokens_TH: Sorted by expert: the first ``tokens_per_expert[0]`` belong to expert 0.
            tokens_per_expert: X counts, which sum to T: a list on the host; an int64 tensor on the
                device for a kernel with ``counts_on_device = True``. If one is 0, the expert's
                weights receive a gradient of zeros.
            probs_T: Routing probability of each token; applied before fc2, as in Megatron, and to
                its bias.
            activation: Called with the output of fc1.

        Returns:
            [T, H], differentiable in tokens, probs, weights and biases.
        """


class TokenDispatcher(Protocol):
    """Stages of Megatron's dispatcher; a ``compute_experts`` stands for the third and fourth."""

    shared_experts: Any  #: Computed between the stages, or None.

    def dispatch_preprocess(self, x: Tensor, routing_map: Tensor, probs: Tensor, /) -> Any:
        """Take [..., H] and the router's [N, E]; return tokens and probs, ready to exchange."""

    def token_dispatch(self, tokens: Tensor, probs: Tensor, /) -> Any:
        """Exchange both, so that each token reaches the ranks of its experts."""

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor, /) -> Any:
        """Return [T, H], sorted by local expert, the tokens of each expert, and probs [T]."""

    def combine_preprocess(self, rows: Tensor, /) -> Any:
        """Put the experts' [T, H] in the order in which they are exchanged."""

    def token_combine(self, rows: Tensor, /) -> Any:
        """Return the rows to the ranks that their tokens came from."""

    def combine_postprocess(self, rows: Tensor, /) -> Any:
        """Sum the rows of each token to the shape of ``x``, shared experts included."""


class GroupedGemm(Protocol):
    """Grouped matmuls over rows that are partitioned into groups; not differentiable.
    ``ops.experts.grouped_matmul`` is the reference implementation."""

    def __init__(self, counts: Sequence[int] | Tensor, device: torch.device) -> None:
        """
        Args:
            counts: Rows of each group, any of which may be 0: on the host, or an int64 tensor on
                the device, which is not read if the class has ``counts_on_device = True``.
        """

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        """Multiply each row by the matrix of its group, which may be a transposed view.

        Returns:
            [T, N].
        """

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        """Compute ``a.T @ b`` over the rows of each group.

        Returns:
            [X, N, K]; zeros for an empty group.
        """

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        """Add ``outer`` in place to an accumulator, which may have a wider dtype."""


@attrs.frozen(kw_only=True)
class ExpertActivation:
    """The experts' activation: ``function(gate) * (up + offset)`` if gated, else ``function(x)``.

    With ``clamp`` the gate is at most this, and up is between its negative and itself.
    """

    function: Callable[[Tensor], Tensor]  #: Of the gate, element by element.
    gated: bool = True  #: Whether fc1 has gate and up.
    is_silu: bool = True  #: Whether ``function`` is SiLU.
    fused: Callable[[Tensor], Tensor] | None = None
    """The whole activation: ``PlatformOps.swiglu`` as wrapped; None if it is not SwiGLU."""
    clamp: float | None = None  #: Bound; None: none.
    offset: float = 0.0  #: Added to up.

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., 2F] (gate, then up; [..., F] if not gated) -> [..., F]."""
        if self.fused is not None:
            return self.fused(hidden)
        if not self.gated:
            return self.function(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return self.function(gate) * (up + self.offset if self.offset else up)

    @property
    def is_swiglu(self) -> bool:
        """Whether it is ``silu(gate) * up``, so that a fused SwiGLU may replace it."""
        return self.gated and self.is_silu and self.clamp is None and not self.offset
