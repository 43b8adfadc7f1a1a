"""The command line of ``ascend-run convert``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ascend_run.plugin_api.contracts import ModelFamily
    from ascend_run.prepare.config.loading import ResolvedConfig
    from ascend_run.prepare.config.raw import RawValue
    from ascend_run.tools.convert.checkpoints import Converted

_KEPT = ("data.seq_length",)
"""Settings outside of ``[model]`` that belong to a model."""


@click.command("convert")
@click.option(
    "--to-hf",
    "direction",
    flag_value="to",
    help="Convert a run folder or a checkpoint to a Hugging Face folder.",
)
@click.option(
    "--from-hf",
    "direction",
    flag_value="from",
    help="Convert a Hugging Face folder to a run folder with a checkpoint of step 0.",
)
@click.option(
    "--step", type=click.IntRange(min=0), help="Step of the checkpoint; default: the newest valid."
)
@click.option(
    "--family",
    metavar="NAME",
    help="Model family; default: from the run's config or the folder's config.json.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Config of the run; default: config.toml of its folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def command(
    direction: str | None,
    step: int | None,
    family: str | None,
    file: Path | None,
    as_json: bool,
    source: Path,
    target: Path,
) -> None:
    """Convert a checkpoint to Hugging Face format, or back.

    \b
    ascend-run convert --to-hf runs/demo exported
    ascend-run convert --from-hf /models/llama runs/llama

    The target must not exist or be empty. Values and dtypes are preserved.
    """
    if direction is None:
        raise click.UsageError("say which way: --to-hf or --from-hf")
    if direction == "from" and (step is not None or file is not None):
        raise click.UsageError("--step and --config go with --to-hf")
    from ascend_run.tools.convert.checkpoints import refuse_taken
    from ascend_run.tools.terminal.byte_bars import byte_bars

    refuse_taken(target)
    with byte_bars() as progress:
        if direction == "to":
            name, converted = _to_hf(source, target, step, family, file, progress)
        else:
            name, converted = _from_hf(source, target, family, progress)
    if as_json:
        import json

        import attrs

        click.echo(json.dumps({"family": name, **attrs.asdict(converted)}, indent=2))
        return
    click.echo(
        f"{converted.folder}: {name}, step {converted.step}, {converted.tensors:,} tensors, "
        f"{converted.bytes / 1e6:,.1f} MB"
    )


def _to_hf(
    source: Path,
    target: Path,
    step: int | None,
    family_name: str | None,
    file: Path | None,
    progress: Callable[[str, int, int], None],
) -> tuple[str, Converted]:
    from ascend_run.prepare.config.reading import read_raw
    from ascend_run.tools.convert.checkpoints import CheckpointSource, export_checkpoint

    found = CheckpointSource.find(source, step, file)
    raw = read_raw(found.config)
    family = _load_family(family_name or raw.family)
    # The folder of the initial weights does not matter here, and may not exist any more.
    kept = {
        key: given
        for key, given in raw.values.items()
        if (key.startswith("model.") and key != "model.hf_path") or key in _KEPT
    }
    config = _resolved(kept, family).config
    return family.model_type, export_checkpoint(found, family, config, target, progress)


def _from_hf(
    source: Path,
    target: Path,
    family_name: str | None,
    progress: Callable[[str, int, int], None],
) -> tuple[str, Converted]:
    from ascend_run.core.hugging_face.json_files import read_hf_config
    from ascend_run.prepare.config.printing import render_toml
    from ascend_run.prepare.config.raw import RawValue
    from ascend_run.prepare.hugging_face.config_keys import config_from_hf
    from ascend_run.tools.convert.checkpoints import import_checkpoint

    config_json = read_hf_config(source)
    model_type = config_json.get("model_type")
    family = _load_family(family_name or _known_family(model_type, source))
    values = {"model.family": family.model_type, **config_from_hf(family, config_json)}
    origin = str(source / "config.json")
    resolved = _resolved({k: RawValue(v, origin) for k, v in values.items()}, family)
    return family.model_type, import_checkpoint(
        source, family, resolved.config, render_toml(resolved), target, progress
    )


def _known_family(model_type: object, source: Path) -> str:
    """Return the built-in family for a Hugging Face ``model_type``.

    Raises:
        ConfigError: There is none.
    """
    from ascend_run.plugin_api.errors import ConfigError
    from ascend_run.registry.discovery import discover
    from ascend_run.registry.kinds import Kind

    known = [n for n, c in discover().items() if c.kind is Kind.MODEL and c.first_party]
    if model_type in known:
        return str(model_type)
    raise ConfigError(
        f"{source}/config.json has model_type {model_type!r}; built-in families: "
        f"{', '.join(known)}; name that of another plugin with --family"
    )


def _load_family(name: str) -> ModelFamily:
    """Load a model family.

    Raises:
        AscendRunError: No plugin has this name, or it is not a model family.
    """
    from ascend_run.core.hooks import Hooks
    from ascend_run.plugin_api.errors import PluginResolutionError
    from ascend_run.registry.discovery import discover
    from ascend_run.registry.kinds import Kind

    catalogue = discover()
    if name in catalogue and catalogue[name].kind is not Kind.MODEL:
        raise PluginResolutionError(f"'{name}' is a {catalogue[name].kind}, not a {Kind.MODEL}")
    plugin: Any = catalogue.load([name])[name]
    options = getattr(plugin, "config_class", None)
    family: ModelFamily = Hooks([plugin(options()) if options else plugin()]).require(
        "ascend_model_family"
    )
    return family


def _resolved(given: Mapping[str, RawValue], family: ModelFamily) -> ResolvedConfig:
    from ascend_run.prepare.config.loading import build_config
    from ascend_run.prepare.config.raw import RawConfig

    return build_config(RawConfig(values=given), {}, family.defaults, ())
