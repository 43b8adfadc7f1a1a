"""Fixtures of the suite of lora."""

from __future__ import annotations

import pytest
from torch import Tensor

from .peft_models import random_batch


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return random_batch()
