from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascend_run.plugin_api import (
    AscendRunError,
    Claim,
    ConfigError,
    HookError,
    PluginResolutionError,
)
from ascend_run.prepare.config.printing import render_toml
from ascend_run.prepare.plan.json_values import plan_values
from ascend_run.prepare.prepare import PreparedRun, prepare
from tests.support.command_line import imported_by
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer
from tests.support.run_file import CONFIG


def plugin_with(hook: str) -> str:
    return plugin_source("ring") + "\n" + "\n".join(f"    {line}" for line in hook.splitlines())


def refusal(file: Path, *overrides: str, **kwargs: object) -> AscendRunError:
    with pytest.raises(AscendRunError) as refused:
        prepare(file, overrides, **kwargs)  # type: ignore[arg-type]
    return refused.value


def test_a_run_is_prepared_with_platform_task_and_family_in_the_set(file: Path) -> None:
    prepared = prepare(file)

    assert prepared.resolution.names == ("llama", "pretrain", "relay", "cpu")
    assert prepared.config.enable == ("relay",)
    names = tuple(plugin.manifest.name for plugin in prepared.instances())
    assert names == prepared.resolution.names
    assert {*prepared.lock} == {*prepared.resolution.names}


def test_every_call_makes_new_instances_with_the_frozen_options(
    install: Install, file: Path
) -> None:
    offer(install, "album")
    prepared = prepare(file, enable=["relay", "album"])

    first, second = prepared.instances(), prepared.instances()

    assert not {id(plugin) for plugin in first} & {id(plugin) for plugin in second}
    (album,) = [plugin for plugin in first if plugin.manifest.name == "album"]
    assert album.config is prepared.config.plugins["album"]


def test_the_command_line_names_features_in_place_of_the_file(file: Path) -> None:
    prepared = prepare(file, ["parallel.context_parallel_size=1"], enable=[])

    assert prepared.config.enable == ()
    assert prepared.resolved.origins["enable"] == "command line"


@pytest.mark.parametrize("order", [["album", "relay"], ["relay", "album"]], ids=str)
def test_the_order_of_naming_does_not_matter(
    install: Install, file: Path, order: list[str]
) -> None:
    offer(install, "album")

    assert prepare(file, enable=order).config.enable == ("album", "relay")


def test_the_world_is_that_of_the_config_where_nothing_else_is_said(file: Path) -> None:
    batch = "train.global_batch_size=4"

    assert prepare(file).layout.world_size == 2
    assert prepare(file, [batch, "run.nproc=4"]).layout.world_size == 4
    assert prepare(file, [batch], world_size=8).layout.dp == 4


def test_a_bad_name_of_each_kind_is_in_one_refusal(file: Path) -> None:
    error = refusal(file, "model.family=lama", enable=["rellay", "cpu"], task="teach")

    assert isinstance(error, PluginResolutionError)
    text = str(error)
    assert "unknown plugin 'rellay'; nearest: relay" in text
    assert "unknown plugin 'lama'; nearest: llama" in text
    assert "unknown plugin 'teach'" in text
    assert "'cpu' is a platform, not a feature; choose it with --platform" in text


def test_a_feature_is_no_platform(file: Path) -> None:
    error = refusal(file, platform="relay")

    assert "'relay' is a feature, not a platform; choose it with --enable" in str(error)


def test_values_are_refused_together(file: Path) -> None:
    error = refusal(file, "train.train_iters=-1", "model.num_layrs=3", "data.seq_length=many")

    assert isinstance(error, ConfigError)
    assert len(error.problems) == 3


def test_what_does_not_fit_together_is_refused_together(install: Install, file: Path) -> None:
    hook = (
        "@hookimpl\ndef ascend_check(self, layout):\n"
        "    return [f'ring: {layout.world_size} ranks make no ring']"
    )
    condition = "requires=(Condition('train.train_iters', '>', 100),)"
    source = plugin_with(hook).replace("summary=", f"{condition}, summary=")
    offer(install, "ring", source.replace("import Claim,", "import Claim, Condition,"))

    error = refusal(file, "data.seq_length=65", enable=["relay", "ring"], world_size=3)

    words = (
        "'ring' requires train.train_iters > 100, but it is 100",
        "3 ranks are not a multiple",
        "data.seq_length=65 cannot be split",
        "ring: 3 ranks make no ring",
    )
    for problem in words:
        assert any(problem in found for found in error.problems), problem


def test_an_optimizer_of_full_parameters_is_refused_without_torch(
    install: Install, file: Path
) -> None:
    """With the distributed optimizer; its ``build`` is not called."""
    hook = (
        "@hookimpl\ndef ascend_optimizer(self):\n"
        "    from ascend_run.plugin_api import OptimizerSpec, OptimizerState\n"
        "    states = {'momentum': OptimizerState()}\n"
        "    return OptimizerSpec(build=None, states=states, element_wise=False)"
    )
    offer(install, "ring", plugin_with(hook))
    enable = ["relay", "ring"]

    assert prepare(file, enable=enable).resolution.owners[Claim.OPTIMIZER] == "ring"
    (problem,) = refusal(file, "ddp.use_distributed_optimizer=true", enable=enable).problems
    assert problem == (
        "'ring' provides an optimizer that is not element-wise: it needs whole parameters, but "
        "ddp.use_distributed_optimizer=true shards the elements of each over data-parallel ranks; "
        "set it to false"
    )


@pytest.mark.parametrize(
    "feature",
    ["relay", pytest.param("ulysses", marks=pytest.mark.needs_plugins("ulysses"))],
)
def test_an_indivisible_sequence_is_one_problem_for_every_plugin(file: Path, feature: str) -> None:
    error = refusal(file, "data.seq_length=63", enable=[feature])

    (problem,) = error.problems
    assert "data.seq_length=63 cannot be split over parallel.context_parallel_size=2" in problem


@pytest.mark.needs_plugins("ulysses")
def test_heads_that_tensor_parallelism_cannot_split_are_one_problem(file: Path) -> None:
    sizes = ("run.nproc=4", "parallel.tensor_model_parallel_size=2", "model.num_attention_heads=1")

    (problem,) = refusal(file, *sizes, enable=["ulysses"]).problems
    assert "model.num_attention_heads=1 cannot be split over" in problem


def test_a_datasets_weights_are_reported_once(file: Path) -> None:
    (problem,) = refusal(file, "data.train_weights=[1.0, 2.0]").problems
    assert problem.startswith("data.train_weights has 2 weights for 1 prefixes")


KERNEL = """
from ascend_run.plugin_api import AttentionFeatures, Manifest, hookimpl

class Plugin:
    manifest = Manifest(
        name="plain-kernel",
        summary="attention without anything special",
        attention=AttentionFeatures(dropout=True),
    )

    @hookimpl
    def ascend_attention_kernel(self):
        raise AssertionError("no kernel is built to plan a run")
"""


def test_a_kernel_without_a_needed_feature_is_rejected_when_planned(
    install: Install, file: Path
) -> None:
    offer(install, "plain-kernel", KERNEL)
    enable = ["relay", "plain-kernel"]

    (problem,) = refusal(file, "model.window_size=[4,0]", enable=enable).problems
    assert "the attention of 'plain-kernel' does not do 'window'" in problem
    prepare(file, ["model.attention_dropout=0.1"], enable=enable)
    prepare(file, ["model.window_size=[4,0]"], enable=["relay"])


def test_a_check_that_returns_a_string_is_a_plugin_error(install: Install, file: Path) -> None:
    offer(install, "ring", plugin_with("@hookimpl\ndef ascend_check(self):\n    return 'oh'"))

    with pytest.raises(HookError, match="ascend_check: 'ring' returned 'oh'; expected a sequence"):
        prepare(file, enable=["relay", "ring"])


def test_a_misspelt_hook_is_refused_before_anything_is_built(install: Install, file: Path) -> None:
    offer(install, "ring", plugin_with("@hookimpl\ndef ascend_chek(self): ..."))

    with pytest.raises(HookError, match="did you mean ascend_check"):
        prepare(file, enable=["relay", "ring"])


def test_the_plan_is_plain_json(install: Install, file: Path) -> None:
    hooks = (
        "@hookimpl\ndef ascend_process_groups(self, layout):\n    return {'halves': [[0], [1]]}\n"
        "@hookimpl\ndef ascend_environment(self):\n    return {'RING': '1'}\n"
        "@hookimpl\ndef ascend_patches(self):\n    raise AssertionError('this one needs torch')\n"
        "@hookimpl\ndef ascend_report(self):\n"
        "    from ascend_run.plugin_api import ReportPanel\n"
        "    return [ReportPanel(title='Ring', metrics=('ring_bytes',), unit='B')]"
    )
    offer(install, "ring", plugin_with(hooks), version="2.5")

    plan = plan_values(prepare(file, enable=["ring", "relay"]).plan)

    assert plan == json.loads(json.dumps(plan))
    ring = next(plugin for plugin in plan["plugins"] if plugin["name"] == "ring")
    assert (ring["distribution"], ring["version"]) == ("ascend-run-ring", "2.5")
    assert plan["claims"]["context-parallel"] == "relay"
    assert plan["layout"]["world_size"] == 2
    assert plan["layout"]["axes"] == {"tp": 1, "cp": 2, "dp": 1, "pp": 1}
    assert plan["layout"]["groups"]["cp"] == [[0, 1]]
    assert plan["layout"]["groups"]["halves"] == [[0], [1]]
    assert plan["process_groups"] == ["halves"]
    assert plan["ranks"] == [
        {"rank": 0, "tp": 0, "cp": 0, "dp": 0, "pp": 0, "ep": 0},
        {"rank": 1, "tp": 0, "cp": 1, "dp": 0, "pp": 0, "ep": 0},
    ]
    assert plan["environment"]["RING"] == "1"
    assert plan["patching"] == ["ring", "cpu"]
    assert plan["panels"] == [{"title": "Ring", "metrics": ["ring_bytes"], "unit": "B"}]
    assert plan["origins"]["model.num_layers"] == "run.toml:8"


def test_one_group_of_two_plugins_is_an_error_naming_both(install: Install, file: Path) -> None:
    hook = "@hookimpl\ndef ascend_process_groups(self):\n    return {'halves': [[0], [1]]}"
    offer(install, "ring", plugin_with(hook))
    offer(install, "wheel", plugin_with(hook).replace("'ring'", "'wheel'"))

    with pytest.raises(HookError) as refused:
        prepare(file, enable=["ring", "wheel", "relay"])

    assert "ring" in str(refused.value)
    assert "wheel" in str(refused.value)


def test_ranks_stand_where_the_layout_puts_them(file: Path) -> None:
    prepared = prepare(file, ["train.global_batch_size=2"], world_size=4)

    for place in prepared.plan.ranks:
        assert place.coordinates.keys() == {"tp", "cp", "dp", "pp", "ep"}
        for axis, at in place.coordinates.items():
            assert at == prepared.layout.coordinate(axis, place.rank)


def test_a_plugin_that_changes_nothing_in_this_run_is_noted(file: Path) -> None:
    plan = prepare(file, ["parallel.context_parallel_size=1"]).plan

    assert plan.idle == {"relay": "parallel.context_parallel_size <= 1"}


def test_the_config_of_a_hugging_face_folder_counts_below_the_users_own(
    file: Path, tmp_path: Path
) -> None:
    described = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 500,
        "rms_norm_eps": 1e-6,
    }
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(described))

    prepared: PreparedRun = prepare(file, [f"model.hf_path={tmp_path / 'hf'}"])

    assert prepared.config.model.ffn_hidden_size == 256
    assert prepared.config.model.vocab_size == 1000
    assert "config.json" in prepared.resolved.origins["model.ffn_hidden_size"]


def test_the_family_is_by_default_that_of_the_folder(file: Path, tmp_path: Path) -> None:
    described = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 500,
    }
    folder = tmp_path / "hf"
    folder.mkdir()

    def write(**changes: object) -> None:
        (folder / "config.json").write_text(json.dumps({**described, **changes}))

    write()
    words = [f"model.hf_path={folder}"]
    prepared: PreparedRun = prepare(file, words)
    assert prepared.config.model.family == "gpt2"
    assert prepared.config.model.normalization == "LayerNorm"
    assert prepared.resolved.origins["model.family"] == f"{folder}/config.json"
    assert "family 'llama' was chosen" in str(refusal(file, *words, "model.family=llama"))
    write(model_type="gpt2-xxl")
    message = str(refusal(file, *words))
    assert f"{folder}/config.json has model_type 'gpt2-xxl', the name of no installed" in message
    assert "set model.family to one that fits" in message
    write(model_type=None)
    assert f"{folder}/config.json names no model_type; set model.family" in str(
        refusal(file, *words)
    )


def test_preparing_imports_no_torch(tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    alone = (
        CONFIG.replace('enable = ["relay"]', "")
        .replace("context_parallel_size = 2", "")
        .replace("nproc = 2", "")
    )
    ours.write_text(alone)

    code, modules = imported_by(["plan", "--config", str(ours), "--json"])

    assert code == 0
    assert "ascend_run.prepare.prepare" in modules
    assert not {"torch", "megatron", "numpy", "transformers"} & modules


@pytest.mark.parametrize("line", ["# Mine.\n", ""])
def test_a_config_of_ones_own_is_not_replaced_by_the_resolved_one(file: Path, line: str) -> None:
    folder = file.parent / "run"
    folder.mkdir()
    own = folder / "config.toml"
    own.write_text(line + CONFIG)
    (file.parent / "link").symlink_to(folder)
    for output_dir in (folder, file.parent / "link"):
        error = refusal(own, f"run.output_dir={output_dir}")
        assert f"would overwrite --config ({own})" in str(error)
    assert prepare(own, [f"run.output_dir={file.parent / 'other'}"])


def test_a_run_folders_own_config_may_be_run_there_again(file: Path) -> None:
    folder = file.parent / "run"
    folder.mkdir()
    words = [f"run.output_dir={folder}"]
    (folder / "config.toml").write_text(render_toml(prepare(file, words).resolved))
    assert prepare(folder / "config.toml", ["run.seed=5"]).config.run.output_dir == str(folder)


@pytest.mark.parametrize(
    "words",
    [
        "data.train=FOLDER/plan",
        "data.train=FOLDER/metrics.jsonl",
        "data.validation=FOLDER/../run/environment",
        "data.tokenizer=FOLDER/plan.json",
    ],
)
def test_data_that_the_run_would_overwrite_are_refused(file: Path, words: str) -> None:
    folder = file.parent / "run"
    error = refusal(file, words.replace("FOLDER", str(folder)), f"run.output_dir={folder}")
    assert f"would overwrite {words.partition('=')[0]}" in str(error)
