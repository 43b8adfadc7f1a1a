"""From what a user asked for to a run that can start, or one refusal. Imports no torch.

Training, ``plan`` and the conformance kit all come this way, so that what is shown is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.core.config.loading import ResolvedConfig, build_config, read_raw
from ascend_run.core.config.raw import COMMAND_LINE, RawConfig
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.errors import AscendRunError, ConfigError, PluginResolutionError
from ascend_run.plugin_api.layout import Layout
from ascend_run.registry.discovery import Catalogue, discover
from ascend_run.registry.explanation import check_hooks, idle
from ascend_run.registry.kinds import CHOSEN_WITH, Kind, Plugin, kind_of
from ascend_run.registry.lock import plugin_lock
from ascend_run.registry.resolution import Resolution, resolve

from .conflicts import explained
from .fit import fit_problems
from .levels import Bundle, choose_members, without_disabled
from .levels import Trial as LevelTrial
from .plan_data import plan_data

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest


@attrs.frozen(kw_only=True)
class Prepared:
    """A run that passed every check that can be made before it starts."""

    resolved: ResolvedConfig
    resolution: Resolution
    layout: Layout
    plan: Mapping[str, Any]
    """What ``plan.json`` holds."""
    lock: Mapping[str, Any]
    """What ``plugins.lock.json`` holds, and the ranks compare."""

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    def instances(self) -> list[Any]:
        """A new instance of every plugin, innermost first."""
        return instances(self.resolution, self.config)

    def run_request(self, *more: Any) -> RunRequest:
        """What core is asked, with new instances of every plugin.

        Args:
            more: Instances of plugins that are not installed, outermost.
        """
        from ascend_run.core.config.printing import render_toml
        from ascend_run.core.run import RunRequest

        return RunRequest(
            config=self.config,
            config_toml=render_toml(self.resolved),
            plugins=[*self.instances(), *more],
            plan=self.plan,
            lock=self.lock,
        )


def prepare(
    file: Path | None,
    overrides: Sequence[str] = (),
    enable: Sequence[str] | None = None,
    platform: str | None = None,
    task: str | None = None,
    world_size: int | None = None,
    level: int | None = None,
    disable: Sequence[str] = (),
) -> Prepared:
    """Read, resolve, check and plan a run.

    Args:
        enable: Features in place of the file's; None leaves the file's. So for ``platform`` and
            ``task``.
        world_size: Ranks; None is ``run.nproc``.
        level: Our own features up to this level too, those of them that can run.
        disable: Features to leave out of the file's and of the level's.

    Raises:
        AscendRunError: All that is wrong at the first stage at which something is: reading,
            plugins, values, and how everything fits together.
    """
    asked = request(file, overrides, enable, platform, task, level, disable)
    return prepare_raw(asked, world_size)


def request(
    file: Path | None,
    overrides: Sequence[str],
    enable: Sequence[str] | None,
    platform: str | None,
    task: str | None,
    level: int | None = None,
    disable: Sequence[str] = (),
) -> RawConfig:
    """What a command line asks for, on top of its file.

    Raises:
        ConfigError: The file cannot be read, or an override is none.
    """
    chosen = {"enable": None if enable is None else [*enable], "platform": platform, "task": task}
    raw = read_raw(file, overrides).replacing(COMMAND_LINE, **chosen)
    return attrs.evolve(raw, level=level, disable=tuple(disable))


def prepare_raw(
    raw: RawConfig, world_size: int | None = None, catalogue: Catalogue | None = None
) -> Prepared:
    """As ``prepare``, from what was read.

    Args:
        catalogue: Plugins to choose from; None is all that are installed.
    """
    known = discover() if catalogue is None else catalogue
    raw, bundle = _with_level(raw, known, world_size)
    try:
        prospect = _prospect(raw, known, world_size)
    except PluginResolutionError as error:
        raise explained(error, _asked(raw), known) from None
    if problems := prospect.problems():
        raise ConfigError("this run cannot start", problems)
    resolution, resolved, layout = prospect.resolution, prospect.resolved, prospect.layout
    plan = plan_data(resolution, known, resolved, layout, prospect.hooks)
    return Prepared(
        resolved=resolved,
        resolution=resolution,
        layout=layout,
        plan=plan if bundle is None else bundle.told_in(plan),
        lock=plugin_lock(resolution, known),
    )


def run_problems_of(raw: RawConfig, world_size: int, catalogue: Catalogue) -> list[str]:
    """Why a run cannot start, after its plugins and values are known to be sound.

    Raises:
        AscendRunError: They are not.
    """
    return _prospect(raw, catalogue, world_size).problems()


@attrs.frozen
class _Prospect:
    """A run whose plugins and values are known, and not yet whether they go together."""

    resolution: Resolution
    resolved: ResolvedConfig
    layout: Layout
    hooks: Hooks

    def problems(self) -> list[str]:
        return fit_problems(self.resolved.config, self.layout, self.resolution, self.hooks)


def _prospect(raw: RawConfig, known: Catalogue, world_size: int | None) -> _Prospect:
    resolution = _resolve(raw, known)
    check_hooks(resolution.order)
    resolved = _build_config(raw, resolution)
    config = resolved.config
    layout = layout_of(config, config.run.nproc if world_size is None else world_size)
    return _Prospect(resolution, resolved, layout, Hooks(instances(resolution, config)))


def _asked(raw: RawConfig) -> list[str]:
    """Every plugin that a run names."""
    return [*raw.enable, raw.platform, raw.task, raw.family]


def _with_level(
    raw: RawConfig, known: Catalogue, world_size: int | None
) -> tuple[RawConfig, Bundle | None]:
    """The run with the features that ``--level`` and ``--disable`` come to."""
    if raw.level is None and not raw.disable:
        return raw, None
    enabled = without_disabled(raw, known)

    def attempt(features: Sequence[str]) -> LevelTrial:
        try:
            tried = _prospect(raw.replacing(COMMAND_LINE, enable=[*features]), known, world_size)
            unused = idle(tried.resolution, tried.resolved.config)
            return LevelTrial(problems=frozenset(tried.problems()), idle=unused)
        except AscendRunError as error:
            return LevelTrial(problems=frozenset(error.problems or [error.headline]))

    if raw.level is None:
        return raw.replacing(f"{COMMAND_LINE}, --disable", enable=enabled), None
    bundle = choose_members(raw.level, enabled, raw.disable, known, attempt)
    origin = f"{COMMAND_LINE}, --level {raw.level}"
    return raw.replacing(origin, enable=[*enabled, *bundle.members]), bundle


def instances(resolution: Resolution, config: RunConfig) -> list[Any]:
    """A new instance of every plugin with its own options, innermost first."""
    return [
        plugin(config.plugins[plugin.manifest.name]) if _options_of(plugin) else plugin()
        for plugin in resolution.order
    ]


def _options_of(plugin: Plugin) -> type | None:
    options: type | None = getattr(plugin, "config_class", None)
    return options


def _resolve(raw: RawConfig, catalogue: Catalogue) -> Resolution:
    wanted = [
        *((name, Kind.FEATURE) for name in raw.enable),
        (raw.platform, Kind.PLATFORM),
        (raw.task, Kind.TASK),
        (raw.family, Kind.MODEL),
    ]
    failures: dict[str, AscendRunError] = {}
    for name, kind in wanted:
        if name in catalogue and catalogue[name].kind is not kind:
            actual = catalogue[name].kind
            failures[name] = PluginResolutionError(
                f"'{name}' is a {actual}, not a {kind}; choose it with {CHOSEN_WITH[actual]}"
            )
    names = [name for name, _ in wanted]
    loaded = catalogue.load_each(name for name in names if name not in failures)
    return resolve(names, loaded.classes, {**loaded.failures, **failures})


def _build_config(raw: RawConfig, resolution: Resolution) -> ResolvedConfig:
    family = _family(resolution)
    hf_values: Mapping[str, Any] = {}
    if raw.hf_path is not None:
        # Late: only runs that start from a Hugging Face folder read its config.
        from ascend_run.core.convert.config_keys import config_from_hf
        from ascend_run.core.convert.json_files import read_hf_config

        hf_values = config_from_hf(family, read_hf_config(raw.hf_path))
    return build_config(
        raw,
        {plugin.manifest.name: _options_of(plugin) for plugin in resolution.order},
        family.defaults,
        resolution.of_kind(Kind.FEATURE),
        hf_values=hf_values,
    )


def _family(resolution: Resolution) -> Any:
    """The model family's data, which is needed before the config and so before any option."""
    (plugin,) = (p for p in resolution.order if kind_of(p.manifest) is Kind.MODEL)
    options = _options_of(plugin)
    family = plugin(options()) if options else plugin()
    return Hooks([family]).require("ascend_model_family")
