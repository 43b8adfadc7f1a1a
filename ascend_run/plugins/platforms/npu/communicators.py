"""Names of hccl communicators, which identify groups to operators that communicate."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


def communicator_name(group: dist.ProcessGroup) -> str:
    """Return the name of a group's hccl communicator; the first call creates it."""
    backend: Any = group._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(dist.get_rank()))
