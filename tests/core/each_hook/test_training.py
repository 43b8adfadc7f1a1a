"""What plugins do to gradients, steps and data shows in the weights and in what the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.core.train.data_parallel import LocalGradients
from ascend_run.plugin_api import ForwardLink, OptimizerSpec, OptimizerState, RunPhase
from tests.support.probed_runs import Run, probe, train


def spec_of(build: Any, *states: str) -> OptimizerSpec:
    return OptimizerSpec(
        build=build, states=dict.fromkeys(states, OptimizerState()), element_wise=True
    )


STEP = {"optimizer.lr": 0.01, "optimizer.lr_decay_style": "constant"}


def moved(folder: Path, *probes: Any, values: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Name -> how far a run's steps moved each weight."""
    before: dict[str, Tensor] = {}

    def look(self: Any, context: Any) -> None:
        model = context.models["policy"].chunks[0].module
        before.update({name: w.detach().clone() for name, w in model.named_parameters()})

    run = train(
        folder, *probes, probe("ascend_before_run", look, "look"), values=STEP | (values or {})
    )
    return {name: weight - before[name] for name, weight in run.weights.items()}


def test_ascend_optimizer_is_the_class_that_steps(tmp_path: Path) -> None:
    made: list[Any] = []

    class Plain(torch.optim.SGD):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, momentum=0.5)
            made.append(self)

    gradients: dict[str, Tensor] = {}

    def look(self: Any, context: Any) -> None:
        model = context.models["policy"].chunks[0].module
        gradients.update({name: w.grad.clone() for name, w in model.named_parameters()})

    distances = moved(
        tmp_path,
        probe("ascend_optimizer", lambda self: spec_of(Plain, "momentum_buffer")),
        probe("ascend_after_step", look, "gradients"),
    )
    assert len(made) == 1
    for name, distance in distances.items():
        torch.testing.assert_close(distance, -0.01 * gradients[name], rtol=1e-4, atol=1e-7)


def test_ascend_optimizer_of_another_class_is_saved_and_resumes(tmp_path: Path) -> None:
    def optimizer(self: Any) -> Any:
        return spec_of(partial(torch.optim.SGD, momentum=0.9), "momentum_buffer")

    def steps(folder: Path, *counts: int) -> Run:
        for count in counts:
            values = {**STEP, "train.train_iters": count, "checkpoint.save_interval": 1}
            run = train(folder, probe("ascend_optimizer", optimizer), values=values)
        return run

    through = steps(tmp_path / "through", 3).weights
    resumed = steps(tmp_path / "resumed", 2, 3).weights
    assert all(torch.equal(resumed[name], weight) for name, weight in through.items())


def test_ascend_mixed_precision_optimizer_wraps_the_first_innermost(
    tmp_path: Path,
) -> None:
    marks: list[str] = []

    def of(name: str) -> Any:
        def wrap(inner: Any) -> Any:
            def update(self: Any) -> None:
                marks.append(name)
                super(made, self).update()

            made = type(inner.__name__, (inner,), {"update": update})
            return made

        return probe("ascend_mixed_precision_optimizer", lambda self: wrap, name)

    for precision in ("fp32", "bf16"):
        values = {"train.precision": precision}
        run = train(tmp_path / precision, of("inner"), of("outer"), values=values)
        assert marks == ["outer", "inner"] * run.context.step
        (part,) = run.context.models["policy"].optimizer.chained_optimizers
        stepped = {id(item.parameter) for item in part.stepped()}
        (chunk,) = run.context.models["policy"].chunks
        assert stepped == {id(parameter) for parameter in chunk.parameters()}
        marks.clear()


def test_ascend_data_parallel_builds_what_is_around_the_model(tmp_path: Path) -> None:
    given: list[set[str]] = []
    synchronised: list[str] = []

    class Mine(LocalGradients):
        def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
            synchronised.append("step")

    def build(**arguments: Any) -> Mine:
        given.append(set(arguments))
        return Mine(arguments["config"], arguments["module"])

    run = train(tmp_path, probe("ascend_data_parallel", lambda self: build))
    assert isinstance(run.context.models["policy"].chunks[0], Mine)
    assert given == [{"config", "ddp_config", "module", "pg_collection"}]
    assert synchronised == ["step"]


def test_ascend_schedule_wraps_training_steps_and_evaluations(
    tmp_path: Path,
) -> None:
    marks: list[tuple[str, bool, int]] = []

    def of(name: str) -> Any:
        def wrap(inner: Any) -> Any:
            def schedule(**arguments: Any) -> Any:
                marks.append((name, arguments["forward_only"], arguments["num_microbatches"]))
                return inner(**arguments)

            return schedule

        return probe("ascend_schedule", lambda self: wrap, name)

    values = {
        "train.global_batch_size": 2,
        "train.eval_interval": 1,
        "train.eval_iters": 1,
        "data.validation": [str(tmp_path / "tokens")],
    }
    train(tmp_path, of("inner"), of("outer"), values=values)
    both = [[("outer", only, 2), ("inner", only, 2)] for only in (True, False, True)]
    assert marks == [mark for marks_of_one in both for mark in marks_of_one]


def entered(name: str, marks: list[tuple[str, str, str]]) -> Any:
    """A probe that marks when a phase begins and ends."""

    def around(self: Any, phase: RunPhase) -> Any:
        @contextmanager
        def scope() -> Iterator[None]:
            marks.append((name, "begins", phase.value))
            try:
                yield
            finally:
                marks.append((name, "ends", phase.value))

        return scope

    return probe("ascend_phase", around, name)


def test_ascend_phase_is_around_what_it_names_and_the_first_is_innermost(tmp_path: Path) -> None:
    marks: list[tuple[str, str, str]] = []

    def note(event: str) -> Any:
        def hear(self: Any) -> None:
            marks.append((event, "", ""))

        return probe(event, hear, event.replace("_", "-"))

    values = {
        "train.eval_interval": 1,
        "train.eval_iters": 1,
        "checkpoint.save_interval": 1,
        "data.validation": [str(tmp_path / "tokens")],
    }
    events = ("ascend_before_step", "ascend_after_step")
    train(tmp_path, entered("inner", marks), *map(note, events), values=values)

    def within(*phases: str) -> list[tuple[str, str, str]]:
        """The marks of phases that are within one another, the outermost first."""
        begin = [("inner", "begins", phase) for phase in phases]
        return [*begin, *(("inner", "ends", phase) for phase in reversed(phases))]

    assert marks == [
        *(mark for phase in ("model", "optimizer", "checkpoint") for mark in within(phase)),
        *within("evaluation", "forward"),
        ("ascend_before_step", "", ""),
        *(mark for phase in ("forward", "backward") for mark in within(phase)),
        *3 * within("reduction"),  # of gradients, of those of norms, of those of embeddings
        *within("update"),
        ("ascend_after_step", "", ""),
        *within("evaluation", "forward"),
        *within("checkpoint"),
    ]

    marks.clear()
    train(tmp_path / "two", entered("inner", marks), entered("outer", marks))
    phases = {phase for _, _, phase in marks}
    assert phases == {*RunPhase} - {RunPhase.EVALUATION, RunPhase.REFERENCE}
    for phase in phases:
        times = [mark[:2] for mark in marks if mark[2] == phase]
        both = ("outer", "begins"), ("inner", "begins"), ("inner", "ends"), ("outer", "ends")
        assert times == [*both] * (len(times) // 4)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ascend_phase_ends_where_an_exception_leaves_it(tmp_path: Path, where: str) -> None:
    marks: list[tuple[str, str, str]] = []

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    def wrap(inner: Any) -> Any:
        def forward(**others: Any) -> Any:
            loss = inner(**others)
            if where == "forward":
                fail()
            loss.register_hook(fail)
            return loss

        return forward

    link = ForwardLink(wrap=wrap, compilable=False)
    with pytest.raises(ArithmeticError, match="on purpose"):
        train(
            tmp_path,
            entered("probe", marks),
            probe("ascend_model", lambda self: lambda model: link, "fails"),
        )
    assert marks[-2:] == [("probe", "begins", where), ("probe", "ends", where)]


def test_ascend_out_of_memory_lets_the_step_be_tried_again(tmp_path: Path) -> None:
    """``tests/core/train/test_retries.py`` has what is restored."""
    forwards: list[float] = []
    room: list[str] = []

    def wrap(inner: Any) -> Any:
        def forward(**others: Any) -> Any:
            loss = inner(**others)
            forwards.append(float(loss.detach().sum()))
            if len(forwards) == 1:
                raise torch.OutOfMemoryError("on purpose")
            return loss

        return forward

    def make_room(name: str) -> Any:
        return probe("ascend_out_of_memory", lambda self: lambda: room.append(name) is None, name)

    link = ForwardLink(wrap=wrap, compilable=False)
    fails = probe("ascend_model", lambda self: lambda model: link, "fails")
    run = train(tmp_path, fails, make_room("first"), make_room("second"))
    assert run.context.step == 1
    assert forwards[0] == forwards[1]
    assert room == ["first"]


def test_without_a_phase_of_a_plugin_megatron_has_no_timers(tmp_path: Path) -> None:
    (bundle,) = train(tmp_path).context.models.values()
    assert bundle.transformer_config.timers is None


def read_by(run_probes: list[Any], folder: Path) -> list[list[int]]:
    """The tokens that the model was given, micro-batch by micro-batch."""
    seen: list[list[int]] = []

    def wrap(inner: Any) -> Any:
        def forward(input_ids: Tensor, **others: Any) -> Any:
            seen.extend(input_ids.tolist())
            return inner(input_ids=input_ids, **others)

        return forward

    link = ForwardLink(wrap=wrap, compilable=False)
    train(
        folder,
        *run_probes,
        probe("ascend_model", lambda self: lambda model: link, "look"),
        values={"train.train_iters": 2},
    )
    return seen


def test_ascend_batch_wraps_what_the_model_reads_innermost_plugin_first(tmp_path: Path) -> None:
    def of(name: str, change: Any) -> Any:
        def wrap(batches: Any) -> Any:
            for batch in batches:
                tokens = change(batch.tensors["tokens"])
                yield attrs.evolve(batch, tensors={**batch.tensors, "tokens": tokens})

        return probe("ascend_batch", lambda self: wrap, name)

    set_to_three, double = of("inner", lambda t: t * 0 + 3), of("outer", lambda t: t * 2)
    assert read_by([set_to_three, double], tmp_path) == [[6] * 16] * 2
