"""How far two runs may lie apart, each with its reason. No tolerance was changed after a
fault had been planted.

A distance of two tensors is ``max|a - b| / max|b|``: elements near zero carry the rounding of the
large ones that they were summed with, so an element's own size says nothing.
"""

from __future__ import annotations

from typing import Final

FLOAT64_EPS: Final = 2.0**-52
FLOAT32_EPS: Final = 2.0**-23

GRADIENT: Final = 1e-10
"""Loss and gradients in float64. Sums of up to 2**18 terms in another order differ by some 1e-13;
the smallest fault that has been met in the field, a factor on a part of one gradient, by 1e-6."""
QUIET: Final = 1e-5
"""A tensor whose largest element is below this share of the model's largest gradient is measured
against that share: it may be zero but for rounding, as the gradient of a key's bias is."""
MODULE: Final = 1e-9
"""Moments of what modules put out, in float64; it only says where, never whether. A moment is a sum
of many elements' powers, so it may lie ten times as far off as they do."""
TRAINED: Final = 1e-5
"""Losses, gradient norms and weights after each step in float32: 84 eps of the largest weight. The
rounding of a step is one eps or so, and Adam, whose epsilon the probes widen, keeps it at that."""
LEARNING_RATE: Final = 1e-3
"""Of the probes, whatever the run's own: with a rate of 1e-9 nothing would move that float32 can
hold, and whatever is wrong with an update would be below every threshold."""
VISIBLE: Final = 64
"""A step of so many roundings of the parameter's largest element has to be seen in it. A step of
Adam is ``rate * g / (g + epsilon)`` by the gradient's size; one that is decades above the rounding
is there even where the rule is another one."""
STEPS: Final = 4
"""Optimizer steps. With the warm-up below the first moves nothing, the second half as far as the
others; an adapter's first factor has no gradient before its second has moved."""
WARMUP: Final = 2
"""Steps of warm-up, so that the schedule's rise is run through as well."""
ADAM_EPSILON: Final = 1e-3
"""Above the rounding of gradients near zero, which Adam would make steps of full size, and large
enough that a gradient of the wrong scale makes a step of the wrong size."""
LOSS_SCALE: Final = 2.0**10
"""To begin with in fp16."""
OWN_TIMES: Final = 4.0
"""In a precision of the run's own, how many times further from the float64 and float32 run a tensor
may lie than the reference's in that precision does: at the same place, in the middle over all
tensors, or one rounding, whichever is most. Another order of sums moves the error of a tensor by
less than its size; a term that is left out, or a factor of two, is a multiple of it."""
OWN_EPS: Final = {"bf16": 2.0**-7, "fp16": 2.0**-10}
