"""Compare a gradient with central differences along one direction, in float64.

The slope of f at x along d is estimated by ``D(t) = (f(x + t d) - f(x - t d)) / 2t``. Its error
has two parts: truncation, ``t**2 / 6`` of the third derivative, and rounding, at most ``u / t``
where u is the rounding error of one value of f. ``R = (4 D(t / 2) - D(t)) / 3`` removes truncation
up to order ``t**4``, and its rounding error is at most ``3u / t``. What it removes is known:
``|D(t) - D(t / 2)|`` is ``t**2 / 8`` of the third derivative. That difference is used as the bound
of truncation. It is an overestimate where f is smooth. Where f jumps or has a kink between the
points (a top-k that selects another expert), it is at least the effect of that on the estimate, so
that such a step is recognized, and a smaller one taken.

At ``t = 2**-13``, for values, directions and derivatives of order 1, truncation is bounded by 2e-9
and rounding by 4e-11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from torch import Generator, Tensor

STEPS: Final = (2.0**-13, 2.0**-18, 2.0**-10)
"""Steps relative to a direction as long as the tensor: the usual one, a smaller one for a function
with kinks, and a larger one for a slope that is lost in rounding."""
ROUNDING: Final = 16 * 2.0**-52
"""Rounding error of one value, relative to the size of its terms: in a sum of n terms it grows with
the square root of n at most, 16 for the 256 tokens of a trial."""
RESOLVED: Final = 1e-4
"""A slope is measured if its bound is at most this share of it. The smallest fault seen in practice
changed a gradient by a share of 1e-3."""
QUIET: Final = 1e-8
"""Or if its bound is at most this share of the size of f: such a slope may be zero."""
TOLERANCE: Final = 2.0**-23
"""Allowed difference relative to the slope, in addition to the bound: Megatron scales gradients by
the inverse of the number of tokens, rounded to float32."""
Values = Sequence[float]


@attrs.frozen
class Slope:
    """A slope along a direction, measured by differences."""

    value: float
    bound: float
    """Of its error."""
    is_measured: bool


def slopes(at: Callable[[float], Values], sizes: Values) -> list[Slope]:
    """Measure the slopes of several functions at 0.

    Args:
        at: Returns the functions' values at a distance along the direction.
        sizes: For each function, the sum of the absolute values of its terms.
    """
    best: list[Slope] = []
    for step in STEPS:
        found = _with_step(at, sizes, step)
        best = [
            min(pair, key=lambda slope: slope.bound)
            for pair in zip(best or found, found, strict=True)
        ]
        if all(slope.is_measured for slope in best):
            break
    return best


def _with_step(at: Callable[[float], Values], sizes: Values, step: float) -> list[Slope]:
    wide, narrow = _central(at, step), _central(at, step / 2)
    found = []
    for far, near, size in zip(wide, narrow, sizes, strict=True):
        value = (4 * near - far) / 3
        bound = abs(far - near) + 3 * ROUNDING * size / step
        is_measured = bound <= max(RESOLVED * abs(value), QUIET * size)
        found.append(Slope(value, bound, is_measured))
    return found


def _central(at: Callable[[float], Values], step: float) -> list[float]:
    return [(a - b) / (2 * step) for a, b in zip(at(step), at(-step), strict=True)]


@attrs.frozen(kw_only=True)
class Derivative:
    """A gradient's slope along one direction, and the measured one."""

    name: str
    """The parameter or input."""
    of: str
    """The function: a term of the loss, or an autograd function."""
    gradient: float
    """Product of gradient and direction."""
    slope: float
    """By differences."""
    bound: float
    """Of the error of ``slope``."""
    is_measured: bool
    is_required: bool = False
    """Whether the gradient must not be 0: that of the main loss, where only auxiliary losses give
    the parameter one."""

    @property
    def agrees(self) -> bool:
        """True if the gradient is right within the error; also if there is no measurement."""
        return self.error == 0.0 and not (self.is_required and self.gradient == 0.0)

    @property
    def error(self) -> float:
        """Relative error of the gradient; 0 within the error of the measurement."""
        size, difference = max(abs(self.gradient), abs(self.slope)), self.gradient - self.slope
        if not self.is_measured or abs(difference) <= self.bound + TOLERANCE * size:
            return 0.0
        return abs(difference) / size

    def problem(self) -> str:
        """Return what is wrong."""
        if self.gradient == 0.0 and abs(self.slope) > self.bound:
            return (
                f"{self.name} gets no gradient from {self.of}, which depends on it: its slope "
                f"along a random direction is {self.slope:.6g} by differences"
            )
        if self.gradient == 0.0:
            return f"{self.name} gets no gradient from {self.of}, only from auxiliary losses"
        return (
            f"the gradient of {self.of} with respect to {self.name} is wrong: its slope along a "
            f"random direction is {self.gradient:.6g}, by differences {self.slope:.6g}, a relative "
            f"error of {self.error:.2e}"
        )


def direction(tensor: Tensor, gradient: Tensor | None, generator: Generator) -> Tensor:
    """Return a direction as long as the tensor: half along the gradient, so that its slope is not
    lost in rounding, half random, so that what the gradient lacks is seen."""
    import torch

    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    drawn = drawn.to(tensor.device)
    drawn /= drawn.norm()
    if gradient is not None and (length := gradient.norm()) > 0:
        drawn += gradient / length
    length = float(tensor.detach().norm()) or tensor.numel() ** 0.5 / 16
    along: Tensor = drawn * (length / drawn.norm())
    return along
