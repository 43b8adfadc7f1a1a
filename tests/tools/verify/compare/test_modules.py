"""Summaries compare whichever way tensors are cut, and under whatever wrappers."""

from __future__ import annotations

import attrs
import pytest
import torch

from ascend_run.tools.verify.capture.moments import summary
from ascend_run.tools.verify.compare import modules
from ascend_run.tools.verify.compare.modules import Trace
from tests.tools.verify.compare.made_up import moments, records


def rows(*parts: torch.Tensor) -> dict[int, list[float]]:
    """What the ranks that hold these parts add up to."""
    return {0: [sum(column) for column in zip(*map(summary, parts), strict=True)]}


@pytest.mark.parametrize("cut", ["sequence", "width", "copies"])
def test_parts_add_up_to_the_whole(cut: str) -> None:
    whole = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = {
        "sequence": whole[torch.tensor([0, 5, 1, 4, 2, 3])].chunk(2),
        "width": whole.chunk(2, 1),
        "copies": (whole, whole),
    }[cut]
    candidate = Trace({"a|out|0": rows(*parts)}, {})
    reference = Trace({"a|out|0": rows(whole)}, {})
    assert modules.first_forward(candidate, reference, 1e-12) is None
    wrong = Trace({"a|out|0": rows(parts[0], 1.001 * parts[1])}, {})
    place = modules.first_forward(wrong, reference, 1e-12)
    assert place is not None
    assert place.module == "a"


def test_partial_sums_are_right_for_experts_only() -> None:
    whole = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for module, right in (("mlp.experts", True), ("mlp.linear_fc2", False)):
        candidate = Trace({f"{module}|out|0": rows(part, whole - part)}, {})
        reference = Trace({f"{module}|out|0": rows(whole)}, {})
        assert (modules.first_forward(candidate, reference, 1e-12) is None) is right


def test_an_input_that_differs_first_is_what_its_parent_made() -> None:
    a, b = moments(1.0).rows, moments(1.5).rows
    reference = Trace({"attention.linear_qkv|out|0": a, "attention.core|in|0": a}, {})
    candidate = Trace({"attention.linear_qkv|out|0": a, "attention.core|in|0": b}, {})
    place = modules.first_forward(candidate, reference, 1e-12)
    assert place is not None
    assert place.module == "attention"


def test_the_innermost_taker_of_a_wrong_gradient_is_named() -> None:
    a, b = moments(1.0).rows, moments(1.5).rows
    keys = ("mlp|out|0", "norm|out|0", "mlp|in|0", "mlp.fc1|in|0")
    reference = Trace({}, dict.fromkeys(keys, a))
    candidate = Trace({}, {key: a if key == "mlp|out|0" else b for key in keys})
    place = modules.first_backward(candidate, reference, 1e-12)
    assert place is not None
    assert place.module == "mlp.fc1"


def test_a_wrapper_goes_by_the_name_of_what_it_wraps() -> None:
    known = {"layers.0", "layers.0.mlp", "layers.0.mlp.fc1"}
    assert modules.plain_name("layers.0.inner.mlp.fc1", known) == "layers.0.mlp.fc1"
    assert modules.plain_name("layers.0.mlp.adapter", known) == "layers.0.mlp"
    row = moments(1.0).rows
    candidate = Trace({"layers.0.mlp.adapter|out|0": {}, "layers.0.mlp|out|0": row}, {})
    reference = Trace({f"{name}|out|0": row for name in known}, {})
    assert modules.aligned(candidate, reference).forward == {"layers.0.mlp|out|0": row}


def test_the_loss_counts_once_for_tensor_parallel_ranks() -> None:
    ranks = records(2, "tp")
    for record in ranks:
        record.forward[0]["model|out|0"] = moments(1.0)
    merged = modules.trace(ranks)
    assert merged.forward["model|out|0"] == moments(1.0).rows
    assert merged.forward["a|out|0"][0][0] == 8.0
    assert attrs.asdict(ranks[0])["rank"] == 0
