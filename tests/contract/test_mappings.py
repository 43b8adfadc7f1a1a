"""What is our own is a record: a mapping is read by a literal key only where a user, another
program, a file or a library defines it. The formats that ``convert`` reads are those of others."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

import ascend_run

PACKAGE: Final = Path(ascend_run.__file__).parent
TOOLS: Final = (
    *("bisect", "chat", "diff", "evaluate", "generate", "new_plugin", "pages", "plan"),
    *("plugins", "preprocess", "preset", "report", "serve", "terminal", "verify"),
)
ROOMS: Final = (
    *("types", "plugin_api", "families", "registry", "text", "prepare", "core", "launch"),
    *("entrypoints", *(f"tools/{tool}" for tool in TOOLS)),
)
READ: Final[dict[str, dict[str, set[str]]]] = {
    "the user's values, behind the properties of RawConfig": {
        "prepare/config/raw.py": {"parsed", "self.values"},
    },
    "settings of a run to plan or to verify, by the keys of a config file": {
        "tools/preset/choosing.py": {"sections", "self.values"},
        "tools/preset/run_file.py": {"values"},
        "tools/verify/building.py": {"_given(question)", "base", "model", "sizes"},
        "tools/verify/dropout.py": {"values"},
        "tools/verify/questions.py": {"data", "layouts.KEYS", "self.base"},
        "tools/verify/thorough.py": {"model", "sides.candidate.base"},
    },
    "options of the command, as click parses them": {
        "tools/preprocess/command.py": {"keys", "values"},
        "tools/serve/command.py": {"given"},
    },
    "headers of HTTP, and messages of ASGI": {
        "tools/serve/app.py": {"http.headers", "request.path_params"},
        "tools/serve/guard.py": {"headers", "scope"},
        "tools/serve/replying.py": {"await receive()"},
    },
    "axes of a layout, by the names that a user gives": {
        "tools/bisect/mixing.py": {"KEYS"},
        "tools/verify/compare/cases.py": {"coordinates", "records[0].sizes"},
        "tools/verify/compare/dropout_masks.py": {"where"},
        "tools/verify/compare/modules.py": {"record.coordinates"},
        "tools/verify/compare/readings.py": {"r.coordinates"},
        "tools/verify/compare/replicas.py": {"record.coordinates", "records[rank].coordinates"},
        "tools/verify/layouts.py": {"KEYS", "sizes"},
    },
    "plugins, devices, parts of a layer and checks, by their names": {
        "tools/plan/command.py": {"found", "os.environ"},
        "tools/plan/cost_model/flops.py": {"found"},
        "tools/plan/cost_model/recompute.py": {"at"},
        "tools/plan/cost_model/traffic.py": {"found"},
        "tools/preset/command.py": {"DEVICES"},
        "tools/verify/compare/locating.py": {"self.wrong"},
        "tools/verify/compare/locating_steps.py": {"readings.wrong"},
        "tools/verify/oracle.py": {"config.plugins"},
    },
    "content of a file or of a request to a rank, typed where it is read": {
        "core/checkpoint/manifest.py": {"content", "value"},
        "core/checkpoint/shard_file.py": {"entry"},
        "core/hugging_face/json_files.py": {"read_hf_config(folder)"},
        "core/hugging_face/stored_tensors.py": {"read_object(index)"},
        "core/log/metrics.py": {"events[-1]", "r", "record"},
        "registry/lock.py": {"origin", "origin.get('dir_info', {})"},
        "registry/offers.py": {"head"},
        "registry/static_manifest.py": {"fields"},
        "text/encoded_documents.py": {"arrays"},
        "text/encoding.py": {"arrays", "values"},
        "text/omissions.py": {"found"},
        "text/rated_steps.py": {"fields", "record.options"},
        "text/sample_files.py": {"report", "values"},
        "text/sidecar.py": {"values"},
        "tools/bisect/journal.py": {"data"},
        "tools/evaluate/each_checkpoint.py": {"events[-1]", "read_raw(run / CONFIG_NAME).values"},
        "tools/evaluate/storing.py": {"content", "fields", "record"},
        "tools/pages/fingerprint_file.py": {"event", "record"},
        "tools/pages/run_folder.py": {"event"},
        "tools/pages/step_metrics.py": {"line", "self.values"},
        "tools/preset/presets.py": {"own", "shared"},
        "tools/report/areas.py": {"line"},
        "tools/report/row_tables.py": {"line"},
        "tools/verify/capture/case_record.py": {"data"},
        "tools/verify/capture/record.py": {"data", "place"},
        "tools/verify/capture/training_record.py": {"data"},
        "tools/generate/rank.py": {"request", "value"},
        "tools/verify/rank_jobs.py": {"request"},
    },
    "Hugging Face's config.json, translated key by key": {
        "core/hugging_face/parameter_rows.py": {"_MTP"},
        "core/model/rotary_scaling.py": {"given"},
        "families/expert_forms.py": {"values"},
        "families/forms.py": {"values"},
        "families/windows.py": {"values"},
        "prepare/hugging_face/config_keys.py": {
            *("family.defaults", "names", "remaining", "result", "values"),
        },
        "prepare/hugging_face/layer_rope.py": {"local"},
        "prepare/hugging_face/latent_rope.py": {"found"},
        "prepare/hugging_face/rope.py": {"config_json", "parameters", "scalings"},
        "prepare/hugging_face/score_heads.py": {"remaining"},
    },
    "files of a tokenizer and of its chat template": {
        "text/chat_tokenizer.py": {"token", "variables"},
        "text/documents.py": {"token"},
        "text/pretokens.py": {
            *("normalizer", "post_processor", "rest", "step", "token", "values"),
            "values['model']",
        },
        "text/reference_templates.py": {"own"},
        "text/sentencepiece_model.py": {"token", "values", "values['model']"},
        "text/templates.py": {"by_name", "entry", "tokenizer_config"},
        "text/tiktoken_model.py": {"config"},
        "text/tokenizer_content.py": {"_read(path)", "token"},
        "text/tokens.py": {"token"},
        # and a run's data.tokenizer, as the user gave it
        "tools/generate/texts.py": {
            *("read_object(folder / name, DataError)", "read_raw(config).values"),
        },
    },
    "records of data, and messages, which templates read": {
        "text/answered_calls.py": {"call", "call['function']"},
        "text/encoder.py": {"answer"},
        "text/handlers/belle.py": {"message", "messages[-1]"},
        "text/handlers/loading.py": {"values"},
        "text/handlers/messages.py": {"message", "messages[0]", "record"},
        "text/handlers/preference.py": {"messages[0]", "record"},
        "text/handlers/process_reward.py": {"record"},
        "text/handlers/sharegpt_pairwise.py": {"answer"},
        "text/handlers/sharegpt_r1.py": {"last"},
        "text/samples.py": {"message"},
        "text/skeletons.py": {"message"},
        "text/tool_calls.py": {"call", "message"},
        "text/turn_weights.py": {"message"},
        "text/turns.py": {"message"},
        "tools/chat/conversation.py": {"call", "call['function']", "message", "turn[answer]"},
        "tools/chat/opening.py": {"function", "tool"},
        "tools/chat/printing.py": {"call", "call['function']"},
        "tools/chat/prompts.py": {"message"},
        "tools/serve/forms.py": {"call", "call['function']"},
        "tools/serve/messages.py": {
            *("call", "call['function']", "found", "function", "tool", "tool['function']"),
        },
        # and rows of benchmarks, in their public formats
        "tools/evaluate/tasks/agieval.py": {"record"},
        "tools/evaluate/tasks/bbh.py": {"content"},
        # and requests and results of lm-evaluation-harness
        "tools/evaluate/harness/requests.py": {"given", "message", "stated", "values"},
        "tools/evaluate/harness/running.py": {
            *("found", "found.get('n-samples', {}).get(task, {})"),
        },
    },
    "named tensors of a batch, a sample index or a state": {
        "core/checkpoint/entries.py": {"saved", "state"},
        "core/data/samples.py": {"self._arrays"},
        "core/model/gpt.py": {"batch"},
        "tools/report/blend.py": {"order"},
        "tools/verify/capture/taps.py": {"batch"},
        "tools/verify/second_oracle.py": {"samples"},
    },
    "dicts of attrs, torch, Megatron, structlog and Python": {
        "core/checkpoint/optimizer_shards.py": {
            "members",
        },
        "core/config/megatron_fields.py": {"given"},
        "core/log/setup.py": {"event"},
        "core/model/transformer_config.py": {"arguments", "chosen"},
        "core/patches.py": {"sys.modules"},
        "core/train/megatron_optimizers.py": {
            *("group", "self._get_model_param_range_map(parameter)"),
        },
        "core/train/optimizer.py": {"group"},
        "core/train/optimizer_kinds.py": {"group"},
        "core/train/step.py": {"optimizer.param_groups[0]"},
        "plugin_api/implementations.py": {"options"},
        "registry/discovery.py": {"option.metadata"},
        "tools/generate/latents.py": {"options"},
        "tools/generate/lean.py": {"options"},
        "tools/plan/trial_build.py": {"frame.f_globals"},
        "tools/verify/capture/rates.py": {"group"},
    },
    "metrics of a step, of the kernel and of any plugin": {
        "core/recorder.py": {"readings"},
        "tools/verify/capture/training_run.py": {"metrics"},
    },
    "the environment": {
        "core/rank/default_group.py": {"os.environ"},
        "launch/rank.py": {"os.environ"},
        "tools/report/command.py": {"os.environ"},
        "core/rank/rank_environment.py": {"environment"},
        "prepare/rank_start.py": {"os.environ"},
    },
}
"""Why -> module -> the mappings that it reads by a literal key."""


def read_by_string(source: str) -> set[str]:
    """The expressions of mappings that are read by a literal key."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=ast.Name(id="Literal")):  # a type
                pass
            case (
                ast.Subscript(value=mapping, slice=ast.Constant(value=str()), ctx=ast.Load())
                | ast.Call(
                    func=ast.Attribute(value=mapping, attr="get" | "pop" | "setdefault"),
                    args=[ast.Constant(value=str()), *_],
                )
            ):
                found.add(ast.unparse(mapping))
    return found


def test_only_what_others_define_is_read_by_string() -> None:
    """A mapping of our own becomes a record instead of a row of the table."""
    found = {
        str(path.relative_to(PACKAGE)): mappings
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if (mappings := read_by_string(path.read_text(encoding="utf-8")))
    }
    assert found == {
        module: names
        for rows in READ.values()
        for module, names in rows.items()
        if (PACKAGE / module).parent.is_dir()  # a tool can be deleted
    }


@pytest.mark.parametrize(
    "source",
    [
        'step = values["progress"]',
        'step = values.get("progress", {})["went_back_to"]',
        'if values.pop("step"): pass',
    ],
)
def test_a_read_by_string_is_found(source: str) -> None:
    assert "values" in read_by_string(source)


@pytest.mark.parametrize("source", ['values["step"] = 3', "values[0]", 'del values["step"]'])
def test_writing_and_reading_by_position_are_none(source: str) -> None:
    assert read_by_string(source) == set()
