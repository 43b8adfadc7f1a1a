"""The gated activation of feed-forwards in one autograd node.

Source: Shazeer 2020, arXiv:2002.05202.
"""

# F width of the feed-forward

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2F] (gate, then up) -> [..., F]: ``silu(gate) * up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
