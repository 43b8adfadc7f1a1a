"""Runs on ranks: what is right is found right, and each planted fault is found, where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ascend_run.plugin_api import AscendRunError
from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.compare import modules, slopes
from ascend_run.tools.verify.compare.thresholds import MODULE
from ascend_run.tools.verify.compare.verdict import Outcome, Phase
from ascend_run.tools.verify.layouts import shown
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.sides import sides_of
from ascend_run.tools.verify.verifier import Verifier
from tests.testing import planted
from tests.testing.bad_plugins import gradients
from tests.tools.verify import faults


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))


TIED = {"model.share_embeddings_and_output_weights": True}
DROPOUT = {"model.hidden_dropout": 0.2, "model.attention_dropout": 0.1}


def with_feature(feature: str, *values: Any) -> Any:
    """A case that there is where there is a feature."""
    return pytest.param(*values, marks=pytest.mark.needs_plugins(feature))


@pytest.mark.exhaustive(
    by=lambda question: ["swap-attention"] if "swap-attention" in question.enable else []
)
@pytest.mark.parametrize(
    ("question", "outcome"),
    [
        (Question(layout={}), Outcome.BITWISE),
        (Question(layout={"dp": 2}, config={"ddp.use_distributed_optimizer": True}), None),
        (Question(layout={"tp": 2, "sp": 1}), None),
        (Question(layout={"pp": 2, "vpp": 2}, config=TIED), None),
        (Question(layout={"pp": 2, "dp": 2, "ep": 2}), None),
        with_feature(
            "swap-attention",
            Question(enable=("swap-attention",), layout={"tp": 2}, config=DROPOUT),
            Outcome.BITWISE,
        ),
        with_feature("ulysses", Question(enable=("ulysses",), layout={"cp": 2}), None),
        with_feature(
            "lora",
            Question(
                enable=("lora",),
                layout={"ep": 2},
                config={"plugins.lora.target_modules": ["experts", "linear_q"]},
            ),
            None,
        ),
    ],
    ids=lambda value: (
        ",".join(value.enable) + shown(value.layout) if hasattr(value, "enable") else ""
    ),
)
def test_what_is_right_is_found_right(
    verify: Verifier, question: Question, outcome: Outcome | None
) -> None:
    verdict = verify(question)
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    assert verdict.fault is None
    assert verdict.outcome is (outcome or Outcome.WITHIN)
    assert all((m.forward or 0) < 1e-9 and (m.backward or 0) < 1e-9 for m in verdict.modules)
    assert {m.module for m in verdict.modules} >= {"embedding", "decoder.layers.1", "model"}
    bitwise = question.enable == ("swap-attention",)
    assert any(check.name == "random streams, dropout" for check in verdict.checks) is bitwise


@pytest.mark.exhaustive(by=lambda phase: [phase])
@pytest.mark.parametrize(
    ("fault", "question", "phase", "module"),
    [
        (
            faults.halve_every_gradient,
            Question(layout={}),
            Phase.BACKWARD,
            "gradient reduction",
        ),
        (faults.drop_the_last_micro_batch, Question(layout={}), Phase.FORWARD, "schedule"),
        (
            faults.keep_norm_gradients_to_oneself,
            Question(layout={"tp": 2, "sp": 1}),
            Phase.BACKWARD,
            "decoder.final_layernorm",
        ),
        (
            faults.untie,
            Question(layout={"pp": 2}, config=TIED),
            Phase.BACKWARD,
            "embedding.word_embeddings",
        ),
        (
            faults.swap_the_gate_and_what_it_gates,
            Question(layout={}),
            Phase.FORWARD,
            "decoder.layers.0.mlp",
        ),
        (faults.step_twice_as_far, Question(layout={}), Phase.OPTIMIZER, "optimizer"),
        (
            faults.draw_alike_on_tensor_parallel_ranks,
            Question(layout={"tp": 2}),
            Phase.FORWARD,
            "random streams",
        ),
        with_feature(
            "lora",
            faults.cut_adapters_off,
            Question(enable=("lora",), layout={}),
            Phase.BACKWARD,
            "decoder.layers.1",
        ),
        with_feature(
            "lora",
            faults.cut_adapters_of_experts_off,
            Question(
                enable=("lora",),
                layout={"ep": 2},
                config={"plugins.lora.target_modules": ["experts"]},
            ),
            Phase.BACKWARD,
            "decoder.layers.1.mlp.experts",
        ),
        with_feature(
            "ulysses",
            faults.mix_up_the_gradient_of_values,
            Question(enable=("ulysses",), layout={"cp": 2}),
            Phase.BACKWARD,
            "decoder.layers.1.self_attention",
        ),
        (faults.count_padding_too, Question(layout={}), Phase.FORWARD, "loss"),
        with_feature(
            "lora",
            faults.train_what_is_frozen,
            Question(enable=("lora",), layout={}),
            Phase.OPTIMIZER,
            "optimizer",
        ),
        with_feature(
            "lora",
            faults.freeze_nothing,
            Question(enable=("lora",), layout={}),
            Phase.OPTIMIZER,
            "optimizer",
        ),
        with_feature(
            "lora",
            faults.freeze_adapters_too,
            Question(enable=("lora",), layout={}),
            Phase.BACKWARD,
            "decoder.layers.0.self_attention",
        ),
        (
            faults.leave_one_parameter_out,
            Question(layout={}, config={"optimizer.lr": 1e-9}),
            Phase.OPTIMIZER,
            "decoder.final_layernorm",
        ),
        (
            faults.reorder_experts,
            Question(layout={"tp": 2, "ep": 2}),
            Phase.FORWARD,
            "decoder.layers.0.mlp",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found_where_it_is(
    verify: Verifier,
    fault: Callable[[], object],
    question: Question,
    phase: Phase,
    module: str,
) -> None:
    verdict = verify(question, fault=fault)
    assert verdict.outcome is Outcome.DIVERGES
    assert verdict.fault is not None
    assert verdict.fault.phase is phase
    assert verdict.fault.module.startswith(module)


def test_a_gradient_that_only_a_later_batch_gets_wrong_is_found_as_one(verify: Verifier) -> None:
    question = Question(layout={"dp": 2}, config={"ddp.use_distributed_optimizer": True})
    fault = verify(question, fault=faults.double_a_gradient_of_the_third_step).fault
    assert fault is not None
    assert (fault.phase, fault.step) == (Phase.BACKWARD, 3)
    assert fault.module == "decoder.layers.1.self_attention.linear_proj"
    assert "in step 3 is wrong" in fault.why


def test_parameters_move_whatever_the_rate_of_the_run_is(verify: Verifier) -> None:
    verdict = verify(Question(layout={}, config={"optimizer.lr": 1e-12, "optimizer.min_lr": 1e-13}))
    assert verdict.good, [check for check in verdict.checks if not check.passed]


HALF = ("loss, bf16", "gradients, bf16", "weights after the steps, bf16", "tied weights, bf16")


@pytest.mark.exhaustive(by=lambda question: [] if question.model == "moe" else ["dense"])
@pytest.mark.parametrize(
    "question",
    [
        Question(layout={"tp": 2, "sp": 1}, model="moe", overrides=("train.precision=bf16",)),
        Question(
            layout={"dp": 2},
            config={"train.precision": "bf16", "ddp.use_distributed_optimizer": True},
        ),
        Question(layout={"pp": 2}, config={"train.precision": "fp16", **TIED}),
    ],
    ids=["moe", "distributed optimizer", "fp16"],
)
def test_a_run_in_half_precision_is_compared_in_it_too(
    verify: Verifier, question: Question
) -> None:
    verdict = verify(question)
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    names = {check.name for check in verdict.checks}
    precision = question.config.get("train.precision", "bf16")
    assert names >= {name.replace("bf16", precision) for name in HALF} | {"gradients"}
    assert any(f"the run trains in {precision}" in note for note in verdict.notes)


@pytest.mark.needs_plugins("swap-attention")
def test_a_swapped_tensor_at_the_wrong_offset_is_found(verify: Verifier) -> None:
    question = Question(enable=("swap-attention",), layout={})
    verdict = verify(question, faults.forget_the_offset_of_saved_tensors)
    assert verdict.fault is not None
    assert verdict.fault.phase is Phase.BACKWARD
    assert verdict.fault.module.startswith("decoder.layers.1.self_attention")
    assert not verdict.fault.in_all_runs


@pytest.mark.needs_plugins("swap-attention")
def test_plugins_that_are_bitwise_are_so_in_half_precision(verify: Verifier) -> None:
    question = Question(
        enable=("swap-attention",), layout={"tp": 2}, config={"train.precision": "bf16"}
    )
    verdict = verify(question)
    assert verdict.outcome is Outcome.BITWISE
    (gradients,) = [check for check in verdict.checks if check.name == "gradients, bf16"]
    assert gradients.tolerance == 0.0
    assert gradients.against == "the same layout without, in bf16"


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "check", "phase"),
    [
        (faults.halve_half_gradients, "gradients, bf16", Phase.BACKWARD),
        (faults.forget_the_copies_of_weights, "master weights, bf16", Phase.OPTIMIZER),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_half_precision_alone_is_found(
    verify: Verifier, fault: Callable[[], Any], check: str, phase: Phase
) -> None:
    question = Question(layout={"dp": 2}, config={"train.precision": "bf16"})
    verdict = verify(question, fault=fault)
    failed = {c.name for c in verdict.checks if not c.passed}
    assert check in failed
    assert all(name.endswith("bf16") for name in failed)
    assert verdict.fault is not None
    assert verdict.fault.phase is phase


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"tp": 2, "sp": 1},
        pytest.param({"cp": 2}, marks=pytest.mark.needs_plugins("ulysses")),
    ],
    ids=shown,
)
def test_no_module_of_a_right_run_with_experts_seems_to_differ(
    gloo_pool: GlooPool, layout: dict[str, int]
) -> None:
    """Where something else is wrong, the search must not stop at one."""
    enable = ("ulysses",) if "cp" in layout else ()
    sides = sides_of(Question(enable=enable, layout=layout, model="moe"))
    ranks = PoolRanks(gloo_pool)
    expected = modules.trace(ranks(sides.plain))
    found = modules.aligned(modules.trace(ranks(sides.candidate)), expected)
    assert modules.first_forward(found, expected, MODULE) is None
    assert modules.first_backward(found, expected, MODULE) is None
    compared = {m.module for m in modules.deviations(found, expected) if m.forward is not None}
    assert compared >= {"decoder.layers.0.mlp.router", "decoder.layers.1.mlp", "model"}


@pytest.mark.exhaustive(by=lambda phase: [phase])
@pytest.mark.parametrize(
    ("plugin", "phase", "module"),
    [
        (planted.ScalesAGradient, Phase.BACKWARD, "decoder.layers.0.self_attention.linear_proj"),
        (planted.RoundsOnce, Phase.BACKWARD, "decoder.layers.0.self_attention.linear_proj"),
        (planted.ForgetsAParameter, Phase.BACKWARD, "decoder.layers.0.self_attention.linear_proj"),
        (planted.LearnsTwiceAsFast, Phase.OPTIMIZER, "optimizer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_plugin_is_found(verify: Verifier, plugin: type, phase: Phase, module: str) -> None:
    with offered(plugin):
        verdict = verify(Question(enable=(plugin.manifest.name,), layout={}))
    assert verdict.fault is not None
    assert (verdict.fault.phase, verdict.fault.module) == (phase, module)
    assert verdict.sentence() == f"DIVERGES at {module} ({phase})"


@pytest.mark.exhaustive(by=lambda plugin: [])
@pytest.mark.parametrize(
    ("plugin", "model", "module", "why"),
    [
        (gradients.ForgetsTheCap, "dense", "self_attention.core_attention", "the gradient of the "),
        (gradients.DetachesTheRouter, "moe", "mlp.router", "decoder.layers.1.mlp.router.weight"),
    ],
    ids=["forgets-the-cap", "detaches-the-router"],
)
def test_a_wrong_gradient_of_both_runs_is_found(
    verify: Verifier, plugin: type[Any], model: str, module: str, why: str
) -> None:
    """A plugin that changes the model is enabled in the reference as well."""
    with offered(plugin):
        verdict = verify(Question(enable=(plugin.manifest.name,), layout={}, model=model))
    assert [check.name for check in verdict.checks if not check.passed] == [slopes.NAME]
    assert verdict.fault is not None
    assert verdict.fault.phase is Phase.BACKWARD
    assert verdict.fault.module == f"decoder.layers.1.{module}"
    assert verdict.fault.why.startswith(why)


def _problems_of_sparse_mixer(pool: GlooPool, *enable: str) -> tuple[str, ...]:
    """Return which gradients seem wrong by differences, if no token of the last router has an
    expert near the selected ones."""
    config, name = {"model.family": "phimoe"}, "decoder.layers.1.mlp.router.weight"
    plain = sides_of(Question(enable=enable, layout={}, model="moe", config=config)).plain
    records = PoolRanks(pool)(plain)
    of_main = {x.name: x for x in records[0].derivatives if x.of == "the main loss"}
    assert of_main[name].is_measured
    assert (of_main[name].gradient, of_main[name].slope) == (0.0, 0.0)
    (check,), _ = slopes.by_differences(records, plain.name)
    return check.details


def test_a_router_whose_experts_all_have_the_weight_1_is_right(gloo_pool: GlooPool) -> None:
    assert _problems_of_sparse_mixer(gloo_pool) == ()


def test_a_detached_sparse_mixer_is_found(gloo_pool: GlooPool) -> None:
    plugin = gradients.DetachesTheRouter
    with offered(plugin):
        found = _problems_of_sparse_mixer(gloo_pool, plugin.manifest.name)
    problem = "gets no gradient from the main loss, only from auxiliary losses"
    assert f"decoder.layers.1.mlp.router.weight {problem}" in found


def test_references_are_made_once_and_a_planted_fault_is_undone(gloo_pool: GlooPool) -> None:
    made = []

    class Counting(PoolRanks):
        def __call__(self, side, fault=None):  # type: ignore[no-untyped-def]
            made.append(side.name)
            return super().__call__(side, fault)

    verify, question = Verifier(Counting(gloo_pool)), Question(layout={"dp": 2})
    assert not verify(question, fault=f"{faults.__name__}:halve_every_gradient").good
    assert verify(question).good
    candidate = ["no plugin on dp=2", "no plugin on dp=2, dropout masks"]
    assert made == ["the plain model on one rank", *candidate * 2]


def test_a_layout_that_the_model_does_not_fit_is_refused(verify: Verifier) -> None:
    with pytest.raises(AscendRunError, match="context"):
        verify(Question(layout={"cp": 2}))
