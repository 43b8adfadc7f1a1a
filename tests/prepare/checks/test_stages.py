from __future__ import annotations

from typing import Any

import pytest

from ascend_run.prepare.checks.stages import stage_problems
from tests.support.tiny_configs import config_with

PP = "parallel__pipeline_model_parallel_size"
VPP = "parallel__virtual_pipeline_model_parallel_size"
LISTED = "model__pipeline_model_parallel_layout"
FIRST = "model__num_layers_in_first_pipeline_stage"
LAST = "model__num_layers_in_last_pipeline_stage"
EMBEDDING = "model__account_for_embedding_in_pipeline_split"
LOSS = "model__account_for_loss_in_pipeline_split"


def test_stages_may_be_listed_as_lists_of_kinds() -> None:
    layout = [["embedding", "decoder"], ["Decoder "], ["decoder", "decoder"], ["loss"]]
    values = {"model__num_layers": 4, PP: 4, LISTED: layout}
    assert list(stage_problems(config_with(**values))) == []
    (problem,) = stage_problems(config_with(**{**values, PP: 3}))
    assert "lists 4 stages for parallel.pipeline_model_parallel_size=3" in problem


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"model__num_layers": 6, PP: 4},
            (
                "model.num_layers=6 cannot be split over 4 pipeline stages; use 1, 2, "
                "3 or 6 stages "
                "or 4 or 8 layers"
            ),
        ),
        (
            {"model__num_layers": 6, PP: 2, VPP: 2},
            (
                "model.num_layers=6 cannot be split over 2 * 2 pipeline stages; use 1, 2, 3 or 6 "
                "stages or 4 or 8 layers"
            ),
        ),
        (
            {VPP: 2},
            (
                "parallel.virtual_pipeline_model_parallel_size=2 needs "
                "parallel.pipeline_model_parallel_size above 1; leave it out"
            ),
        ),
        (
            {PP: 2, VPP: 1},
            (
                "parallel.virtual_pipeline_model_parallel_size=1 makes no chunks; use "
                "2 or more, or "
                "leave it out"
            ),
        ),
        (
            {PP: 2, EMBEDDING: True, "model__num_layers": 6},
            (
                "model.num_layers=6 and 1 for "
                "model.account_for_embedding_in_pipeline_split cannot be "
                "split over 2 pipeline stages; use 5 or 7 layers"
            ),
        ),
        (
            {PP: 2, FIRST: 3, LAST: 2, "model__num_layers": 6},
            (
                "model.num_layers_in_first_pipeline_stage=3 and "
                "model.num_layers_in_last_pipeline_stage=2 must add up to model.num_layers=6, as "
                "parallel.pipeline_model_parallel_size=2 has no rank between"
            ),
        ),
        (
            {PP: 3, FIRST: 3, "model__num_layers": 6},
            (
                "model.num_layers_in_first_pipeline_stage=3 leave 3 of "
                "model.num_layers=6 layers to 2 "
                "other pipeline ranks; leave 2 or 4"
            ),
        ),
        (
            {PP: 2, FIRST: 3, VPP: 2, "model__num_layers": 7},
            "model.num_layers_in_first_pipeline_stage=3 must be a multiple of 2; use 2 or 4",
        ),
        (
            {PP: 2, LISTED: "Ett|tt|tL", "model__num_layers": 5},
            (
                "model.pipeline_model_parallel_layout='Ett|tt|tL' lists 3 stages for "
                "parallel.pipeline_model_parallel_size=2; list 2 or 4"
            ),
        ),
        (
            {PP: 2, LISTED: "Ett|xtL", "model__num_layers": 3},
            (
                "model.pipeline_model_parallel_layout='Ett|xtL' has 'x'; expected E (embedding), t "
                "(decoder), L (loss)"
            ),
        ),
        (
            {PP: 2, LISTED: "tt|tEL", "model__num_layers": 3},
            (
                "model.pipeline_model_parallel_layout='tt|tEL' must begin with the "
                "embedding (E) and "
                "end with the loss (L), each once"
            ),
        ),
        (
            {PP: 2, LISTED: "Ett|tL", "model__num_layers": 4},
            "model.pipeline_model_parallel_layout='Ett|tL' lists 3 layers (t); model.num_layers=4",
        ),
        (
            {PP: 2, LISTED: "Ett|tL", FIRST: 2, "model__num_layers": 3},
            (
                "model.pipeline_model_parallel_layout does not go with "
                "model.num_layers_in_first_pipeline_stage; leave one of them out"
            ),
        ),
    ],
)
def test_an_indivisible_layout_is_reported_with_valid_sizes(
    values: dict[str, Any], problem: str
) -> None:
    assert stage_problems(config_with(**values)) == [problem]
