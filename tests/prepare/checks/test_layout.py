from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.core.config.layout import layout_of
from ascend_run.plugin_api import Layout
from ascend_run.plugin_api.error_text import around, divisors, one_of
from ascend_run.prepare.checks.layout import layout_problems, run_problems
from tests.support.tiny_configs import config_with

TP = "parallel__tensor_model_parallel_size"
CP = "parallel__context_parallel_size"
EP = "parallel__expert_model_parallel_size"
ETP = "parallel__expert_tensor_parallel_size"
PP = "parallel__pipeline_model_parallel_size"
VPP = "parallel__virtual_pipeline_model_parallel_size"
GROUP = "parallel__microbatch_group_size_per_vp_stage"


def test_the_layout_has_the_sizes_of_the_config() -> None:
    config = config_with(**{TP: 2, CP: 2, EP: 4})
    assert layout_of(config, 8, rank=3) == Layout(world_size=8, rank=3, tp=2, cp=2, ep=4)


@pytest.mark.parametrize(
    ("world_size", "multiple", "values", "problem"),
    [
        (
            6,
            1,
            {TP: 2, CP: 2, "train__global_batch_size": 6},
            (
                "6 ranks are not a multiple of the parallel sizes tensor * context * pipeline = 4; "
                "use 4 or 8 in all (--nproc counts those of one node; plan also takes --world, "
                "which counts all)"
            ),
        ),
        (
            2,
            None,
            {EP: 4, "model__num_moe_experts": 4, "train__global_batch_size": 2},
            (
                "2 ranks are not a multiple of the parallel sizes expert tensor * expert * "
                "pipeline "
                "= 4; use 4 in all (--nproc counts those of one node; plan also takes --world, "
                "which counts all)"
            ),
        ),
        (
            4,
            None,
            {TP: 4, "model__num_attention_heads": 10, "model__kv_channels": 8},
            (
                "model.num_attention_heads=10 cannot be split over "
                "parallel.tensor_model_parallel_size=4; use 1, 2, 5 or 10"
            ),
        ),
        (
            4,
            None,
            {TP: 4, "model__num_attention_heads": 12, "model__num_query_groups": 6},
            (
                "model.num_query_groups=6 cannot be split over, or shared evenly by, "
                "parallel.tensor_model_parallel_size=4; use 1, 2, 3, 6 or 12"
            ),
        ),
        (  # two of four ranks would have three of six rows of keys and values
            4,
            None,
            {TP: 4, "model__num_query_groups": 1, "model__kv_channels": 3},
            (
                "model.num_query_groups=1 cannot be split over, or shared evenly by, "
                "parallel.tensor_model_parallel_size=4; use 1 or 2"
            ),
        ),
        (
            2,
            None,
            {TP: 2, "model__ffn_hidden_size": 33},
            (
                "model.ffn_hidden_size=33 cannot be split over "
                "parallel.tensor_model_parallel_size=2; use 1, 3, 11 or 33"
            ),
        ),
        (
            1,
            None,
            {"parallel__sequence_parallel": True},
            (
                "parallel.sequence_parallel=true needs parallel.tensor_model_parallel_size "
                "above 1; "
                "leave it out"
            ),
        ),
        (
            2,
            None,
            {TP: 2, "model__num_moe_experts": 4},
            (
                "experts with parallel.tensor_model_parallel_size=2 need "
                "parallel.sequence_parallel=true"
            ),
        ),
        (
            2,
            None,
            {EP: 2, "train__global_batch_size": 2},
            (
                "parallel.expert_model_parallel_size=2 needs experts; set "
                "model.num_moe_experts, or "
                "use 1"
            ),
        ),
        (
            4,
            None,
            {EP: 4, "model__num_moe_experts": 6, "train__global_batch_size": 4},
            (
                "model.num_moe_experts=6 cannot be split over "
                "parallel.expert_model_parallel_size=4; use 1, 2, 3 or 6"
            ),
        ),
        (
            2,
            None,
            {CP: 2},
            (
                "parallel.context_parallel_size=2 needs a plugin that exchanges the "
                "sequence between "
                "ranks; add one that claims 'context-parallel' (ascend-run plugins --json shows "
                "the claims), or use 1"
            ),
        ),
        (
            2,
            1,
            {CP: 2, "data__seq_length": 1001},
            (
                "data.seq_length=1001 cannot be split over parallel.context_parallel_size=2; use "
                "1000 or 1002"
            ),
        ),
        (
            2,
            2,
            {CP: 2, "data__seq_length": 1002},
            (
                "data.seq_length=1002 cannot be split over parallel.context_parallel_size=2 * the "
                "sequence partition's multiple=2; use 1000 or 1004"
            ),
        ),
        (
            4,
            1,
            {CP: 2, TP: 2, "parallel__sequence_parallel": True, "data__seq_length": 2},
            (
                "data.seq_length=2 cannot be split over parallel.context_parallel_size=2 * "
                "parallel.tensor_model_parallel_size=2; use 4"
            ),
        ),
        (
            2,
            None,
            {"train__micro_batch_size": 2, "train__global_batch_size": 6},
            (
                "train.global_batch_size=6 is not a multiple of train.micro_batch_size=2 times 2 "
                "data-parallel ranks; use 4 or 8"
            ),
        ),
        (
            2,
            None,
            {ETP: 2, "train__global_batch_size": 2},
            (
                "parallel.expert_tensor_parallel_size=2 needs experts; set "
                "model.num_moe_experts, or use 1"
            ),
        ),
        (
            2,
            None,
            {
                ETP: 2,
                "model__num_moe_experts": 4,
                "model__moe_ffn_hidden_size": 33,
                "train__global_batch_size": 2,
            },
            (
                "model.moe_ffn_hidden_size=33 cannot be split over "
                "parallel.expert_tensor_parallel_size=2; use 1, 3, 11 or 33"
            ),
        ),
        (
            4,
            None,
            {PP: 2, VPP: 2, "model__num_layers": 4, "train__global_batch_size": 6},
            (
                "train.global_batch_size=6 makes 3 micro-batches on each rank, but a virtual "
                "pipeline takes them in groups of parallel.pipeline_model_parallel_size=2; use "
                "4 or 8"
            ),
        ),
        (
            2,
            None,
            {PP: 2, VPP: 2, GROUP: 4, "model__num_layers": 4, "train__global_batch_size": 9},
            (
                "train.global_batch_size=9 makes 9 micro-batches on each rank, but a virtual "
                "pipeline takes them in groups of parallel.microbatch_group_size_per_vp_stage=4; "
                "use 8 or 12"
            ),
        ),
        (
            2,
            None,
            {PP: 2, VPP: 2, GROUP: 1, "model__num_layers": 4, "train__global_batch_size": 4},
            (
                "parallel.microbatch_group_size_per_vp_stage=1 must be at least "
                "parallel.pipeline_model_parallel_size=2; leave it out, or use that"
            ),
        ),
        (
            2,
            None,
            {PP: 2, "parallel__overlap_p2p_comm": True},
            (
                "parallel.overlap_p2p_comm=true needs "
                "parallel.virtual_pipeline_model_parallel_size; leave it out"
            ),
        ),
        (
            2,
            None,
            {
                PP: 2,
                VPP: 2,
                "model__num_layers": 4,
                "train__global_batch_size": 2,
                "parallel__overlap_p2p_comm": True,
            },
            "parallel.overlap_p2p_comm=true needs parallel.batch_p2p_comm=false",
        ),
    ],
)
def test_indivisible_values_are_reported_with_valid_ones(
    world_size: int, multiple: int | None, values: dict[str, Any], problem: str
) -> None:
    config = config_with(**values)
    problems = layout_problems(config, layout_of(config, world_size), sequence_multiple=multiple)
    assert problems == [problem]


@pytest.mark.parametrize(("length", "asked"), [(1001, []), (1002, []), (1003, ["1002 or 1004"])])
def test_an_uneven_partition_takes_any_length_that_tp_divides(
    length: int, asked: list[str]
) -> None:
    tp = 2 if length > 1001 else 1
    config = config_with(
        **{TP: tp, CP: 4}, parallel__sequence_parallel=tp > 1, data__seq_length=length
    )
    problems = layout_problems(config, layout_of(config, 4 * tp), sequence_multiple=0)
    assert len(problems) == len(asked)
    for problem, lengths in zip(problems, asked, strict=True):
        assert "parallel.tensor_model_parallel_size=2" in problem
        assert "context_parallel_size" not in problem
        assert problem.endswith(lengths)


def test_all_problems_are_one_error() -> None:
    config = config_with(
        **{TP: 4, CP: 3, EP: 5},
        model__num_attention_heads=10,
        model__num_query_groups=3,
        model__num_moe_experts=6,
        data__seq_length=1001,
        optimizer__lr_decay_style="WSD",
    )
    problems = "\n".join(run_problems(config, layout_of(config, 7), sequence_multiple=2))
    for word in (
        "model.hidden_size=64",
        "model.num_query_groups=3;",
        "7 ranks",
        "model.num_attention_heads=10 cannot",
        "model.num_query_groups=3 cannot",
        "model.num_moe_experts=6",
        "data.seq_length=1001",
        "lr_wsd_decay_iters",
        "experts with",
    ):
        assert word in problems


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 16),
)
def test_a_layout_without_a_problem_divides(tp: int, cp: int, ep: int, world_size: int) -> None:
    config = config_with(
        **{TP: tp, CP: cp, EP: ep},
        model__num_moe_experts=6,
        parallel__sequence_parallel=tp > 1,
        train__global_batch_size=720720,
    )
    layout = layout_of(config, world_size)
    problems = layout_problems(config, layout, sequence_multiple=1)
    dense, experts = layout.tp * layout.cp, layout.expt_tp * layout.ep
    divides = world_size % math.lcm(dense, experts) == 0 and 4 % tp == 0 and 1024 % (tp * cp) == 0
    assert (problems == []) == divides


def test_working_values_read_as_a_sentence() -> None:
    assert divisors(10) == [1, 2, 5, 10]
    assert one_of([4]) == "4"
    assert one_of(list(range(20))) == "0, 1, 2, 3, 4, 5, ..., 17, 18 or 19"
    assert around(100, 32) == "96 or 128"
    assert around(3, 32) == "32"
