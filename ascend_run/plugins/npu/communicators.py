"""hccl's names of groups of ranks, by which operators that communicate know them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


def communicator_name(group: dist.ProcessGroup) -> str:
    """The name of a group's hccl communicator; the first question makes it."""
    backend: Any = group._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(dist.get_rank()))
