"""Tolerances for comparing two runs, with their reasons. They were fixed before any faults were
planted to test them.

The error of a tensor is ``max|a - b| / max|b|``. It is not elementwise, because elements near zero
carry the rounding errors of the large terms that they are sums of.
"""

from __future__ import annotations

from typing import Final

FLOAT64_EPS: Final = 2.0**-52
FLOAT32_EPS: Final = 2.0**-23

GRADIENT: Final = 1e-10
"""Loss and gradients in float64. Reordering sums of up to 2**18 terms changes them by about 1e-13;
the smallest fault seen in practice, a factor on a part of one gradient, by 1e-6."""
QUIET: Final = 1e-5
"""If a tensor's largest element is below this share of the model's largest gradient, its error is
relative to that share: it may be zero up to rounding, like the gradient of a key bias."""
FAMILY: Final = 1e-7
"""Loss and gradients in float64 against transformers, some of whose models have constants of eight
digits (the GELU of Bloom)."""
MODULE: Final = 1e-9
"""Moments of module outputs in float64. They only locate a fault and never decide whether there is
one. A moment sums powers of many elements, so its error may be ten times that of the elements."""
TRAINED: Final = 1e-5
"""Losses, gradient norms and weights after each step in float32: 84 eps of the largest weight. The
rounding error of a step is about one eps; the large epsilon of Adam in the probes keeps it so."""
STEP_GRADIENT: Final = 1e-3
"""Gradients of the steps in float32, by their norms. They only locate a fault: a gradient with a
smaller error does not change a weight by ``TRAINED``, as an update is 1e-3 of a weight or less."""
STEP_QUIET: Final = 1e-2
"""As ``QUIET``, for these norms: rounding errors in float32 are 1e-7 of the largest gradient."""
FROM_ZERO: Final = 4.0
"""The error of a weight after a step is relative to at least this many full updates for each step:
a weight that began at 0 consists of updates, whose rounding error is that of the gradient over
Adam's epsilon (an eps of float32 over 1e-3), not that of the weight."""
LEARNING_RATE: Final = 1e-3
"""Of the probes, instead of the run's: with a rate of 1e-9, updates would vanish in float32 and
faults in them would be below every tolerance."""
VISIBLE: Final = 64
"""An update of at least this many eps of a parameter's largest element must change the parameter.
Adam's update is ``rate * g / (g + epsilon)`` for a gradient of size g; other rules have updates of
the same order of magnitude."""
STEPS: Final = 4
"""Optimizer steps. With the warm-up below, the first step has learning rate 0 and the second half
the full one; an adapter's first factor has no gradient until its second factor has changed."""
STOP: Final = 2
"""Steps before the checkpoint that ``--resume`` stops at; as many follow."""
WARMUP: Final = 2
"""Warm-up steps, so that the warm-up of the schedule is covered as well."""
ADAM_EPSILON: Final = 1e-3
"""Larger than the rounding errors of gradients near zero, which Adam would scale up to full steps,
and large enough that a gradient of the wrong scale changes the size of the step."""
LOSS_SCALE: Final = 2.0**10
"""Initial loss scale in fp16."""
FALSE_ALARM: Final = 1e-12
"""Probability of a false alarm of one comparison of dropout masks: two independent masks that are
equal, or a kept share as far from its expectation (Chernoff bound). A verification makes up to a
hundred thousand such comparisons, so it raises one at most once in ten million times."""
REPLICATED: Final = 1e-4
"""Two ranks hold replicas of an activation if its moments agree to this relative error; they do to
a few eps of float32, and those of different shards differ in the first digits."""
HALF_PRECISION_FACTOR: Final = 4.0
"""In half precision, by what factor a tensor's error relative to the float64 and float32 runs may
exceed the largest of: the reference's error of the same tensor, its median error over all tensors,
and one eps. A different reduction order changes an error by less than its size; a missing term, or
a factor of two, by a multiple of it."""
HALF_PRECISION_EPS: Final = {"bf16": 2.0**-7, "fp16": 2.0**-10}
