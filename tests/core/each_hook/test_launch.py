"""What plugins say before and while a rank comes to stand."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import megatron.core.utils
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import source_hash
from ascend_run.core.train import groups as groups_module
from ascend_run.entrypoints.cli import run as command_line
from ascend_run.plugin_api import CommOptions, ConfigError, HookError, Patch, PlatformError
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.prepare.handed_over import HandedOver
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.comm_options import with_comm_options
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer
from tests.support.marking import Passing
from tests.support.probed_runs import built, built_from, prepare, probe, request, train
from tests.support.tokens import write_tokens

from . import jobs

FILLING = """
    @hookimpl
    def ascend_defaults(self, config):
        return {
            "model.kv_channels": config.model.num_attention_heads,
            "model.hidden_size": 1,
            "model.normalization": "LayerNorm",
        }
"""


def test_ascend_defaults_fill_what_neither_the_family_nor_the_user_sets(
    install: Install, tmp_path: Path
) -> None:
    offer(install, "filling", plugin_source("filling") + FILLING)
    prepared = prepare(tmp_path, {"enable": ["filling"]})
    model, origins = prepared.config.model, prepared.plan.origins
    assert (model.kv_channels, model.hidden_size, model.normalization) == (8, 32, "RMSNorm")
    assert origins["model.kv_channels"] == "plugin 'filling'"
    assert origins["model.hidden_size"] == "the test"
    assert origins["model.normalization"] == "family 'llama'"
    handed = HandedOver.of(prepared).run_request()
    assert handed.config == prepared.config  # the ranks do not call it again


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model.nothing": 1}, r"model.nothing: .* no such option \(plugin 'filling'\)"),
        ({"model.kv_channels": -1}, r"kv_channels=-1 must be above 0 \(plugin 'filling'\)"),
    ],
    ids=["unknown", "out of bounds"],
)
def test_ascend_defaults_are_checked_like_any_value(
    install: Install, tmp_path: Path, values: dict[str, int], problem: str
) -> None:
    hook = f"\n    @hookimpl\n    def ascend_defaults(self):\n        return {values}\n"
    offer(install, "filling", plugin_source("filling") + hook)
    with pytest.raises(ConfigError) as refused:
        prepare(tmp_path, {"enable": ["filling"]})
    (found,) = refused.value.problems
    assert re.search(problem, found)


def test_ascend_defaults_of_two_plugins_for_one_key_are_an_error(
    install: Install, tmp_path: Path
) -> None:
    for name in ("filling", "refilling"):
        offer(install, name, plugin_source(name) + FILLING)
    with pytest.raises(HookError) as refused:
        prepare(tmp_path, {"enable": ["filling", "refilling"]})
    (problem,) = str(refused.value).splitlines()
    assert all(word in problem for word in ("ascend_defaults", "'filling'", "'refilling'"))


CHECKING = """
    @hookimpl
    def ascend_check(self, config, layout):
        return [f"{name}: {{config.model.num_layers}} layers on {{layout.world_size}} ranks"]
"""


def test_ascend_check_refuses_a_run_with_every_problem_of_every_plugin(
    install: Install, tmp_path: Path
) -> None:
    for name in ("strict", "stricter"):
        offer(install, name, plugin_source(name) + CHECKING.format(name=name))
    with pytest.raises(ConfigError) as refused:
        prepare(tmp_path, {"enable": ["strict", "stricter"], "parallel.context_parallel_size": 2})
    own = [problem for problem in refused.value.problems if problem.startswith("strict")]
    assert own == ["strict: 2 layers on 1 ranks", "stricter: 2 layers on 1 ranks"]
    assert any("context" in problem for problem in refused.value.problems)


TUNED = """
    @hookimpl
    def ascend_environment(self, config):
        return {"TUNED_LAYERS": str(config.model.num_layers)}

    @hookimpl
    def ascend_before_run(self, context):
        import os

        print("the run sees", os.environ["TUNED_LAYERS"])
"""


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:megatron\.")
def test_ascend_environment_is_set_before_the_run(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "tuned", plugin_source("tuned") + TUNED)
    words = [
        "train",
        f"data.train={write_tokens(tmp_path)}",
        f"run.output_dir={tmp_path / 'run'}",
        "train.train_iters=1",
        "train.precision=fp32",
        "data.seq_length=16",
        *(f"model.{name}={size}" for name, size in jobs.SMALLEST.items()),
    ]
    with mock.patch.dict(os.environ):
        os.environ.pop("TUNED_LAYERS", None)
        assert command_line([*words, "--enable", "tuned"]) == 0
    assert "the run sees 1" in capsys.readouterr().out


def test_ascend_process_groups_are_created_on_all_ranks_kept_by_members(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    assert gloo_pool.run(jobs.own_groups, 2, str(tmp_path)) == [
        {"both": [0, 1], "each": [0]},
        {"both": [0, 1], "each": [1], "last": [1]},
    ]


def test_ascend_process_groups_may_not_take_a_name_of_megatrons(tmp_path: Path) -> None:
    taken = probe("ascend_process_groups", lambda self: {"tp": [[0]]}, "taker")
    with pytest.raises(HookError, match="'tp'"), built(tmp_path, taken):
        raise AssertionError("it was built all the same")


def test_ascend_comm_options_reach_megatrons_groups_and_those_of_plugins(tmp_path: Path) -> None:
    seen: dict[str, set[Any]] = {}

    class Mine(Passing):
        def group_options(self, options: CommOptions) -> str:
            return f"{options.buffer_mb} MiB"

    @contextmanager
    def watch() -> Iterator[None]:
        def noting(create: Any, name: Callable[[Any], str]) -> Any:
            def call(*ranks: Any, **options: Any) -> Any:
                seen.setdefault(name(options), set()).add(options.pop("pg_options", None))
                return create(*ranks, **options)

            return call

        of_megatron = noting(parallel_state.create_group, lambda options: options["group_desc"])
        of_plugins = noting(dist.new_group, lambda _: "of a plugin")
        with (
            mock.patch.object(parallel_state, "create_group", of_megatron),
            mock.patch.object(groups_module, "dist", Passing(dist)) as there,
        ):
            there.new_group = of_plugins
            yield

    options = {"tp": 8, "expt_dp": 16, "one": 32}
    probes = [
        probe("ascend_device", lambda self, local_rank: Mine(CpuDevice(local_rank)), "device"),
        probe("ascend_process_settings", lambda self: {"watch": watch()}, "watch"),
        probe("ascend_process_groups", lambda self: {"one": [[0]], "other": [[0]]}, "groups"),
        probe(
            "ascend_comm_options",
            lambda self: {name: CommOptions(buffer_mb=mb) for name, mb in options.items()},
            "options",
        ),
    ]
    prepared = prepare(tmp_path)
    asked = request(prepared, *probes)
    planned = with_comm_options(attrs.evolve(prepared, hooks=Hooks(asked.plugins)))
    with built_from(attrs.evolve(asked, comm_options=planned.comm_options)):
        pass
    assert seen.pop("of a plugin") == {"32 MiB", None}
    assert seen.pop("TENSOR_MODEL_PARALLEL_GROUP") == {"8 MiB"}
    assert seen.pop("EXPERT_DATA_PARALLEL_GROUP") == {"16 MiB"}
    assert {None}.union(*seen.values()) == {None}


def test_ascend_device_is_active_for_the_length_of_the_run(tmp_path: Path) -> None:
    happened: list[str] = []

    class Mine(Passing):
        def activate(self) -> None:
            happened.append("activate")
            self.inner.activate()

        def deactivate(self) -> None:
            happened.append("deactivate")
            self.inner.deactivate()

    device = probe("ascend_device", lambda self, local_rank: Mine(CpuDevice(local_rank)))
    step = probe("ascend_after_step", lambda self: happened.append("step"), "steps")
    run = train(tmp_path, device, step)
    assert happened == ["activate", "step", "deactivate"]
    assert isinstance(run.context.device, Mine)


def replacement(numerator: int, denominator: int) -> int:
    """What stands in for Megatron's ``divide``; it does not look at the remainder."""
    return numerator // denominator


PATCH = Patch(
    target="megatron.core.utils:divide",
    replacement=replacement,
    why="a test",
    versions=">=0.15",
    source_hash=source_hash(megatron.core.utils.divide),
    until="never",
)


def patching(name: str = "patcher", **changes: Any) -> Any:
    return probe("ascend_patches", lambda self: [attrs.evolve(PATCH, **changes)], name)


def test_ascend_patches_stand_during_the_run_and_are_undone_after_it(tmp_path: Path) -> None:
    original, during = megatron.core.utils.divide, []

    def look(self: Any) -> None:
        during.append(megatron.core.utils.divide)

    train(tmp_path, patching(), probe("ascend_before_run", look, "onlooker"))
    assert during == [replacement]
    assert megatron.core.utils.divide is original


def test_ascend_patches_are_undone_after_a_failure(tmp_path: Path) -> None:
    original = megatron.core.utils.divide

    def fail(self: Any) -> None:
        assert megatron.core.utils.divide is replacement
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, patching(), probe("ascend_before_run", fail, "failure"))
    assert megatron.core.utils.divide is original


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"versions": "<0.1"}, f"<0.1, found {importlib.metadata.version('megatron-core')}"),
        ({"source_hash": "0" * 16}, "has changed: expected 0000000000000000"),
        ({"target": "megatron.core.utils:multiply"}, "megatron.core.utils:multiply does not exist"),
        ({"target": "megatron.core.nowhere:divide"}, "megatron.core.nowhere:divide does not exist"),
    ],
    ids=["version", "hash", "attribute", "module"],
)
def test_ascend_patches_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PlatformError) as refused, built(tmp_path, patching(**changes)):
        raise AssertionError("it was built all the same")
    assert "'patcher': " in str(refused.value)
    assert problem in str(refused.value)


@pytest.mark.parametrize("second", ["rival", "patcher"])
def test_ascend_patches_of_one_target_are_refused_by_name(tmp_path: Path, second: str) -> None:
    both = [PATCH, attrs.evolve(PATCH, why="once more")]
    probes = (
        [patching(), patching("rival")]
        if second == "rival"
        else [probe("ascend_patches", lambda self: both, "patcher")]
    )
    with (
        pytest.raises(PlatformError, match=f"'patcher' and '{second}' both patch"),
        built(tmp_path, *probes),
    ):
        raise AssertionError("it was built all the same")


def test_ascend_process_settings_hold_for_the_length_of_the_run(tmp_path: Path) -> None:
    happened: list[str] = []

    def setting(name: str) -> Any:
        @contextmanager
        def hold() -> Iterator[None]:
            happened.append(f"{name} on")
            yield
            happened.append(f"{name} off")

        return probe("ascend_process_settings", lambda self, config: {name: hold()}, name)

    step = probe("ascend_after_step", lambda self: happened.append("step"), "steps")
    train(tmp_path, setting("inner"), setting("outer"), step)
    assert happened == ["inner on", "outer on", "step", "outer off", "inner off"]


def test_ascend_process_settings_are_put_back_after_a_failure(tmp_path: Path) -> None:
    stack = ExitStack()
    undone: list[bool] = []
    stack.callback(lambda: undone.append(True))

    def fail(self: Any) -> None:
        assert not undone
        raise RuntimeError("planted")

    probes = (
        probe("ascend_process_settings", lambda self: {"switch": stack}, "setter"),
        probe("ascend_before_run", fail, "failure"),
    )
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, *probes)
    assert undone == [True]


def test_the_recursion_limit_is_put_back_after_the_run(tmp_path: Path) -> None:
    """As torch.compile leaves it, where its cache is cold."""
    before = sys.getrecursionlimit()
    raised: list[int] = []

    def compile_something(self: Any) -> None:
        sys.setrecursionlimit(before + 1000)
        raised.append(sys.getrecursionlimit())

    train(tmp_path, probe("ascend_before_step", compile_something))
    assert raised == [before + 1000]
    assert sys.getrecursionlimit() == before


def test_ascend_process_settings_of_one_name_are_refused_by_name(tmp_path: Path) -> None:
    probes = [
        probe("ascend_process_settings", lambda self: {"switch": nullcontext()}, name)
        for name in ("setter", "rival")
    ]
    with (
        pytest.raises(HookError, match="'setter' and 'rival' both give 'switch'"),
        built(tmp_path, *probes),
    ):
        raise AssertionError("it was built all the same")


FAMILY = """
from ascend_run.plugin_api import ModelFamily


class Family(Plugin):
    manifest = Manifest(name="plain", summary="GPT-2's parts")

    @hookimpl
    def ascend_model_family(self):
        defaults = {"model.normalization": "LayerNorm", "model.gated_linear_unit": False}
        return ModelFamily(
            model_type="plain", architecture="Plain", defaults=defaults, keys=(), tensors=()
        )
"""


def test_ascend_model_family_sets_the_defaults_of_the_model(
    install: Install, tmp_path: Path
) -> None:
    points = {"ascend_run.models": {"plain": "plain_family:Family"}}
    source = {"plain_family.py": plugin_source("plain") + FAMILY}
    install("ascend-run-plain", points, source)
    with built(tmp_path, values={"model.family": "plain"}) as (_, context):
        assert context.config.model.normalization == "LayerNorm"
        layer = context.models["policy"].chunks[0].module.decoder.layers[0]
        assert layer.input_layernorm.bias is not None
        assert layer.mlp.linear_fc1.weight.shape == (48, 32)


def test_ascend_sequence_partition_cuts_batch_and_rotary_tables_alike(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    first, second = gloo_pool.run(jobs.cut_backwards, 2, str(tmp_path))
    for seen, positions in ((first, range(8, 16)), (second, range(8))):
        assert seen["batch"] == [*positions]
        assert seen["rotary"] == [*positions]
        assert seen["before the cut"] == [*range(16)]


def test_ascend_sequence_partition_without_an_owner_refuses_to_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="context_parallel_size"):
        prepare(tmp_path, {"parallel.context_parallel_size": 2})
