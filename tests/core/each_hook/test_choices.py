"""What a plugin provides for the model is what the model is made of, and what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from ascend_run.core.model.router import Router
from ascend_run.ops.experts.loop_experts import loop_experts
from ascend_run.ops.linear.cross_entropy import CrossEntropy
from ascend_run.plugin_api import AttentionFeatures, ConfigError, HookError, PositionBias, RoleSpec
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.plugins.platforms.cpu.operators import platform_ops
from ascend_run.plugins.tasks.pretrain import PretrainConfig
from ascend_run.plugins.tasks.pretrain.task import PretrainTask
from tests.support.marking import Passing, marking_link
from tests.support.probed_runs import built, probe, train


class HalvedNorm(nn.Module):
    """Not a normalisation at all, with the parameter that one has."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        assert config.num_layers == 2
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight / 2


def test_ascend_norm_is_the_class_of_every_normalisation(tmp_path: Path) -> None:
    run = train(tmp_path, probe("ascend_norm", lambda self: HalvedNorm))
    norms = [name for name, part in run.model.named_modules() if isinstance(part, HalvedNorm)]
    layers = [f"decoder.layers.{i}" for i in (0, 1)]
    expected = [f"{layer}.{name}_layernorm" for layer in layers for name in ("input", "pre_mlp")]
    assert sorted(norms) == sorted([*expected, "decoder.final_layernorm"])
    assert run.readings()[0]["loss"] != train(tmp_path / "plain").readings()[0]["loss"]


def test_ascend_norm_of_none_keeps_the_kernels_own(tmp_path: Path) -> None:
    with built(tmp_path, probe("ascend_norm", lambda self: None)) as (_, context):
        model = context.models["policy"].chunks[0].module
        assert type(model.decoder.final_layernorm).__module__ == "ascend_run.core.model.norm"


def test_ascend_platform_ops_compute_the_norms_gates_and_rotations(tmp_path: Path) -> None:
    called: list[str] = []
    ops = platform_ops()

    def counted(name: str) -> Any:
        def call(*args: Any) -> Tensor:
            called.append(name)
            return getattr(ops, name)(*args)

        return call

    counting = {name: counted(name) for name in ("rms_norm", "swiglu", "rotary")}
    mine = attrs.evolve(ops, split_qkv_rotary=None, **counting)
    train(tmp_path, probe("ascend_platform_ops", lambda self: mine))
    # Two layers, each two norms, a gate, and rotations of q and of k; and the last norm.
    assert sorted(called) == ["rms_norm"] * 5 + ["rotary"] * 4 + ["swiglu"] * 2


def test_ascend_fused_operators_wrap_those_of_the_platform_in_order(
    tmp_path: Path,
) -> None:
    ran: list[str] = []

    def of(plugin: str) -> Any:
        def wrap(ops: Any) -> Any:
            def swiglu(x: Tensor) -> Tensor:
                ran.append(plugin)
                return ops.swiglu(x)

            return attrs.evolve(ops, swiglu=swiglu)

        def result(self: Any, device: Any, role: str) -> Any:
            assert (device.name, role) == ("cpu", "policy")
            return wrap

        return probe("ascend_fused_operators", result, plugin)

    run = train(tmp_path, of("inner"), of("outer"))
    assert ran == ["outer", "inner"] * 2  # two layers
    plain = train(tmp_path / "plain", probe("ascend_fused_operators", lambda self: None))
    assert run.readings()[0]["loss"] == plain.readings()[0]["loss"]


def test_ascend_fused_operators_are_what_linears_and_experts_are_given(tmp_path: Path) -> None:
    seen: list[Any] = []
    mine = attrs.evolve(platform_ops(), split_qkv_rotary=None)
    run_with = probe("ascend_fused_operators", lambda self: lambda ops: mine, "table")
    linears = probe("ascend_linear", lambda self, ops: seen.append(ops), "linears")
    with built(tmp_path, run_with, linears):
        assert seen == [mine] * 8


class CountingKernel(Passing):
    """Attention as the inner kernel computes it; a mark for each forward."""

    def __init__(self, inner: Any, marks: list[Any], mark: Any) -> None:
        super().__init__(inner)
        self.marks, self.mark = marks, mark

    def forward(self, *args: Any) -> Any:
        self.marks.append(self.mark)
        return self.inner.forward(*args)


def test_ascend_attention_kernel_stands_in_for_the_platforms(tmp_path: Path) -> None:
    marks: list[Any] = []
    kernel = CountingKernel(FusedCpuAttention(), marks, "mine")
    train(tmp_path, probe("ascend_attention_kernel", lambda self: kernel))
    assert marks == ["mine", "mine"]


class Plain(Passing):
    """The platform's kernel, of which it is said that it can nothing that is special."""

    features = AttentionFeatures()


@pytest.mark.parametrize(
    ("option", "value", "feature"),
    [("window_size", [4, 0], "window"), ("attention_dropout", 0.1, "dropout")],
)
def test_ascend_attention_kernel_without_a_needed_feature_is_rejected(
    tmp_path: Path, option: str, value: Any, feature: str
) -> None:
    """The error is raised before training."""
    values = {f"model.{option}": value}
    plain = probe("ascend_attention_kernel", lambda self: Plain(FusedCpuAttention()), "plain")
    with pytest.raises(ConfigError) as refused, built(tmp_path, plain, values=values):
        raise AssertionError("it was built all the same")
    (problem,) = refused.value.problems
    assert problem.startswith(f"the attention of 'plain' does not do '{feature}', which model.")
    for probes, chosen in (((plain,), {}), ((), values)):
        with built(tmp_path, *probes, values=chosen):
            pass


def test_ascend_position_bias_reaches_the_kernel_of_each_layer(
    tmp_path: Path,
) -> None:
    """And what cannot add it is refused, by the name of who asks."""
    seen: list[Any] = []

    class Looking(Passing):
        def forward(self, q: Any, k: Any, v: Any, spec: Any) -> Any:
            seen.append(spec.position_bias)
            return self.inner.forward(q, k, v, spec)

    bias = PositionBias(slopes=torch.ones(8, dtype=torch.float64))
    biased = probe("ascend_position_bias", lambda self: bias, "biased")
    looking = probe("ascend_attention", lambda self: lambda inner: Looking(inner), "looking")
    train(tmp_path, biased, looking)
    assert len(seen) == 2
    assert all(given is bias for given in seen)
    plain = probe("ascend_attention_kernel", lambda self: Plain(FusedCpuAttention()), "plain")
    with (
        pytest.raises(ConfigError, match="'plain' does not do 'position_bias', which 'biased'"),
        built(tmp_path, biased, plain),
    ):
        raise AssertionError("it was built all the same")


def test_ascend_attention_that_lets_less_through_is_refused_by_its_name(tmp_path: Path) -> None:
    narrow = probe("ascend_attention", lambda self: lambda inner: Plain(inner), "narrow")
    around = probe("ascend_attention", lambda self: lambda inner: Passing(inner), "around")
    values = {"model.attention_dropout": 0.1}
    with (
        pytest.raises(ConfigError, match="'narrow' does not do 'dropout'") as refused,
        built(tmp_path, narrow, around, values=values),
    ):
        raise AssertionError("it was built all the same")
    assert len(refused.value.problems) == 1


def test_ascend_attention_wraps_each_kernel_innermost_plugin_first(
    tmp_path: Path,
) -> None:
    marks: list[Any] = []

    def of(name: str) -> Any:
        def wrap(self: Any, groups: Any, layer_index: int) -> Any:
            assert isinstance(groups, ProcessGroupCollection)
            return lambda inner: CountingKernel(inner, marks, (name, layer_index))

        return probe("ascend_attention", wrap, name)

    train(tmp_path, of("inner"), of("outer"))
    assert marks == [("outer", 0), ("inner", 0), ("outer", 1), ("inner", 1)]


def test_ascend_router_is_the_class_of_every_router(tmp_path: Path) -> None:
    class FirstExpert(Router):
        """Sends every token to the first two experts."""

        def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
            logits_TX = logits.flatten(0, -2)
            chosen = torch.zeros_like(logits_TX, dtype=torch.bool)
            chosen[:, :2] = True
            return logits_TX.softmax(-1) * chosen, chosen

    run = train(tmp_path, probe("ascend_router", lambda self: FirstExpert), model="moe")
    assert run.readings()[0]["expert_load"] == [0.5, 0.5, 0.0, 0.0]
    assert run.readings()[0]["expert_load_by_layer"] == [[0.5, 0.5, 0.0, 0.0]] * 2


def test_ascend_experts_compute_on_the_kernels_own_parameters(tmp_path: Path) -> None:
    shapes: list[Any] = []

    def experts(tokens: Tensor, counts: Any, probs: Tensor, weights: Any, activation: Any) -> Any:
        shapes.append((tokens.shape, sum(counts), weights.fc1.shape, weights.fc2.shape))
        return loop_experts(tokens, counts, probs, weights, activation)

    run = train(tmp_path, probe("ascend_experts", lambda self: experts), model="moe")
    # 16 tokens go to two experts each; four experts of width 48 on a hidden size of 32.
    assert shapes == [((32, 32), 32, (4, 96, 32), (4, 32, 48))] * 2
    plain = train(tmp_path / "plain", model="moe")
    assert run.weights.keys() == plain.weights.keys()
    assert run.readings()[0]["loss"] == plain.readings()[0]["loss"]


def test_ascend_experts_may_take_the_counts_on_the_device(tmp_path: Path) -> None:
    class Experts:
        counts_on_device = True

        def __call__(self, tokens: Tensor, counts: Tensor, *rest: Any) -> Tensor:
            assert isinstance(counts, Tensor)
            assert (counts.dtype, counts.device) == (torch.int64, tokens.device)
            seen.append(counts.tolist())
            return loop_experts(tokens, seen[-1], *rest)

    seen: list[list[int]] = []
    run = train(tmp_path, probe("ascend_experts", lambda self: Experts()), model="moe")
    assert [sum(counts) for counts in seen] == [32, 32]
    plain = train(tmp_path / "plain", model="moe")
    assert run.readings()[0]["loss"] == plain.readings()[0]["loss"]


@pytest.mark.parametrize("wraps", [False, True], ids=["plain output", "wrapped output"])
def test_the_loss_uses_hidden_states_or_a_wrapped_output_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wraps: bool
) -> None:
    asked: list[str] = []

    def counted(way: str) -> Any:
        inner = getattr(CrossEntropy, way)

        def loss(self: CrossEntropy, *args: Tensor, **more: Tensor | None) -> Any:
            asked.append(way)
            return inner(self, *args, **more)

        return loss

    for way in ("from_hidden", "from_logits"):
        monkeypatch.setattr(CrossEntropy, way, counted(way))

    output = probe("ascend_output_layer", lambda self: marking_link([], None), "output")
    run = train(tmp_path, *([output] if wraps else []))
    assert asked == ["from_logits" if wraps else "from_hidden"]
    plain = train(tmp_path / "plain").readings()[0]["loss"]
    assert run.readings()[0]["loss"] == pytest.approx(plain, rel=1e-6)


def test_ascend_configure_changes_megatrons_config_innermost_plugin_first(
    tmp_path: Path,
) -> None:
    seen: list[float] = []

    def of(name: str, epsilon: float) -> Any:
        def change(arguments: Any) -> Any:
            seen.append(arguments["layernorm_epsilon"])
            return {**arguments, "layernorm_epsilon": epsilon}

        return probe("ascend_configure", lambda self: change, name)

    values = {"model.layernorm_epsilon": 0.125}
    with built(tmp_path, of("inner", 0.25), of("outer", 0.5), values=values) as (_, context):
        assert seen == [0.125, 0.25]
        assert context.models["policy"].transformer_config.layernorm_epsilon == 0.5


def test_ascend_configure_that_mutates_its_argument_is_a_plugin_error(
    tmp_path: Path,
) -> None:
    def change(arguments: Any) -> Any:
        arguments["layernorm_epsilon"] = 0.25
        return arguments

    changing = probe("ascend_configure", lambda self: change, "changing")
    with (
        pytest.raises(HookError, match="'changing' changed the arguments"),
        built(tmp_path, changing),
    ):
        raise AssertionError("it was built all the same")


def test_ascend_configure_gets_the_role_and_the_groups(tmp_path: Path) -> None:
    asked: list[Any] = []

    def configure(self: Any, role: str, device: Any, groups: Any) -> Any:
        asked.append((role, device.name, groups.tp.size()))

    with built(tmp_path, probe("ascend_configure", configure)):
        assert asked == [("policy", "cpu", 1)]


def test_ascend_task_says_which_models_are_trained_on_what(tmp_path: Path) -> None:
    forwards: list[tuple[str, list[int]]] = []

    class Constant(PretrainTask):
        """Learns that after 7 comes 8, under a role of its own."""

        roles = (RoleSpec(name="student"),)

        def datasets(self, context: Any, train_samples: int, valid_samples: int) -> Any:
            item = {
                "tokens": torch.full((16,), 7),
                "labels": torch.full((16,), 8),
                "loss_mask": torch.ones(16),
                "position_ids": torch.arange(16),
            }
            return super().datasets(context, 0, 0)._replace(train=[item] * train_samples)

        def forward_step(self, context: Any, model: Any, batch: Any) -> Any:
            (role,) = context.models
            forwards.append((role, batch.tensors["tokens"].unique().tolist()))
            return super().forward_step(context, model, batch)

    contexts: list[Any] = []
    train(
        tmp_path,
        probe("ascend_task", lambda self: Constant(PretrainConfig()), "constant"),
        probe("ascend_after_run", lambda self, context: contexts.append(context), "after"),
        values={"train.train_iters": 2},
    )
    assert forwards == [("student", [7])] * 2
    assert contexts[0].models["student"].trains
