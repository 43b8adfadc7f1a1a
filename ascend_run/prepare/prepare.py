"""From a user's request to a run that can start, or one error. Imports no torch.

Training, ``plan`` and the conformance kit all use this, so the plan shows what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.core.hooks import Hooks
from ascend_run.core.run_files import run_folder_problems
from ascend_run.plugin_api.errors import AscendRunError, ConfigError, PluginResolutionError
from ascend_run.registry.discovery import Catalogue, discover
from ascend_run.registry.hooks import check_hooks
from ascend_run.registry.kinds import CHOSEN_WITH, Kind
from ascend_run.registry.lock import plugin_lock
from ascend_run.registry.resolution import Resolution, resolve
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .checks.compatibility import compatibility_problems
from .config.loading import ResolvedConfig, read_raw
from .config.raw import COMMAND_LINE, RawConfig
from .conflicts import explained
from .instances import config_of, family_of, instances
from .levels import Trial, choose_members, with_level, without_disabled
from .plan.building import build_plan
from .plan.explanation import idle
from .plan.json_values import plan_text
from .plan.records import Bundle, Plan

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest
    from ascend_run.plugin_api.contracts import CommOptions


@attrs.frozen(kw_only=True)
class ResolvedRun:
    """A run with valid plugins and values."""

    raw: RawConfig
    resolution: Resolution
    resolved: ResolvedConfig
    layout: Layout
    catalogue: Catalogue
    hooks: Hooks
    """Hooks of the run's plugins, for the torch-free ones."""
    comm_options: Mapping[str, CommOptions] = attrs.field(factory=dict)
    """Maps process groups to options of their communicators, which ``tools.plan`` adds."""

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def idle(self) -> Mapping[str, str]:
        """Maps each plugin that has no effect in this run to the condition that disables it."""
        return idle(self.resolution, self.config)

    @property
    def lock(self) -> Mapping[str, object]:
        """Contents of ``plugins.lock.json``, compared over ranks."""
        return plugin_lock(self.resolution, self.catalogue)

    def problems(self) -> list[str]:
        """Return why the run cannot start; empty if it can."""
        return compatibility_problems(
            self.config, self.layout, self.resolution, self.hooks, self.model_differences
        )

    def model_differences(self, folder: str) -> list[str]:
        """Return the fields of ``[model]`` that another Hugging Face folder gives otherwise.

        Raises:
            ConfigError: It cannot be read, or has no model of this run's family.
        """
        from .hugging_face.config_keys import folder_differences

        kept = {key: v for key, v in self.raw.values.items() if not key.startswith("model.")}
        read = {"model.hf_path": folder, "model.family": self.raw.family}
        raw = attrs.evolve(self.raw, values=kept).replacing(folder, **read)
        other = config_of(raw, self.resolution)[0].config
        return folder_differences(family_of(self.resolution), self.config, other)

    def instances(self) -> list[Any]:
        """Return a new instance of every plugin, innermost first."""
        return instances(self.resolution.order, self.config)

    def run_request(self, *more: Any) -> RunRequest:
        """Build the request to core, with new instances of every plugin.

        Args:
            more: Instances of plugins that are not installed, outermost.
        """
        from ascend_run.core.run import RunRequest

        from .config.printing import render_toml

        return RunRequest(
            config=self.config,
            config_toml=render_toml(self.resolved),
            plugins=[*self.instances(), *more],
            idle=self.idle,
            lock=self.lock,
            comm_options=self.comm_options,
        )


@attrs.frozen(kw_only=True)
class PreparedRun(ResolvedRun):
    """A run that passed every check that can be made before it starts, with its plan."""

    plan: Plan
    """Without costs, which ``tools.plan`` adds."""

    def run_request(self, *more: Any) -> RunRequest:
        """Build the request to core, with the plan for the run folder."""
        return attrs.evolve(super().run_request(*more), plan_json=plan_text(self.plan))


def prepare(
    file: Path | None,
    overrides: Sequence[str] = (),
    enable: Sequence[str] | None = None,
    platform: str | None = None,
    task: str | None = None,
    world_size: int | None = None,
    level: int | None = None,
    disable: Sequence[str] = (),
) -> PreparedRun:
    """Read, resolve, check and plan a run.

    Args:
        enable: Features that replace the file's; None keeps the file's. Likewise ``platform`` and
            ``task``.
        world_size: Number of ranks; None is ``run.nproc``.
        level: Also enable our own features up to this level, as far as they can run.
        disable: Features to leave out of the file's and the level's.

    Raises:
        AscendRunError: Lists all problems of the first stage that has any: reading, plugins,
            values, compatibility.
    """
    raw = request(file, overrides, enable, platform, task, level, disable)
    return prepare_raw(raw, world_size)


def request(
    file: Path | None,
    overrides: Sequence[str],
    enable: Sequence[str] | None,
    platform: str | None,
    task: str | None,
    level: int | None = None,
    disable: Sequence[str] = (),
) -> RawConfig:
    """Read the file and apply a command line to it.

    Raises:
        ConfigError: The file cannot be read, or an override is malformed.
    """
    chosen = {"enable": None if enable is None else [*enable], "platform": platform, "task": task}
    raw = read_raw(file, overrides).replacing(COMMAND_LINE, **chosen)
    return attrs.evolve(raw, level=level, disable=tuple(disable))


def prepare_raw(
    raw: RawConfig, world_size: int | None = None, catalogue: Catalogue | None = None
) -> PreparedRun:
    """Prepare a run from a raw config; see ``prepare``.

    Args:
        catalogue: Available plugins; None is all that are installed.
    """
    known = discover() if catalogue is None else catalogue
    raw, bundle = _with_level(raw, known, world_size)
    run = _checked_run(raw, known, world_size)
    plan = build_plan(run.resolution, known, run.resolved, run.layout, run.hooks)
    plan = plan if bundle is None else with_level(plan, bundle)
    return PreparedRun(**attrs.asdict(run, recurse=False), plan=plan)


def prepare_rank(raw: RawConfig, world_size: int) -> ResolvedRun:
    """Prepare and check a rank that does not write the run folder, so needs no plan.

    Raises:
        AscendRunError: As ``prepare_raw``.
    """
    known = discover()
    raw, _ = _with_level(raw, known, world_size)
    return _checked_run(raw, known, world_size)


def _checked_run(raw: RawConfig, known: Catalogue, world_size: int | None) -> ResolvedRun:
    try:
        run = resolve_run(raw, known, world_size)
    except PluginResolutionError as error:
        named = [*raw.enable, raw.platform, raw.task, raw.family]
        raise explained(error, named, known) from None
    if problems := [*run.problems(), *run_folder_problems(run.config, raw.file)]:
        raise ConfigError("this run cannot start", problems)
    return run


def resolve_run(raw: RawConfig, known: Catalogue, world_size: int | None = None) -> ResolvedRun:
    """Resolve a run, in less time than ``prepare_raw`` takes to check and plan it.

    Raises:
        AscendRunError: The plugins or values are invalid.
    """
    resolution = _resolve(raw, known)
    check_hooks(resolution.order)
    resolved, hooks = config_of(raw, resolution)
    config = resolved.config
    return ResolvedRun(
        raw=raw,
        resolution=resolution,
        resolved=resolved,
        layout=layout_of(config, config.run.nproc if world_size is None else world_size),
        catalogue=known,
        hooks=hooks,
    )


def _with_level(
    raw: RawConfig, known: Catalogue, world_size: int | None
) -> tuple[RawConfig, Bundle | None]:
    """Apply ``--level`` and ``--disable`` to the features of a run."""
    if raw.level is None and not raw.disable:
        return raw, None
    enabled = without_disabled(raw, known)

    def attempt(features: Sequence[str]) -> Trial:
        try:
            tried = resolve_run(raw.replacing(COMMAND_LINE, enable=[*features]), known, world_size)
            return Trial(problems=frozenset(tried.problems()), idle=tried.idle)
        except AscendRunError as error:
            return Trial(problems=frozenset(error.problems or [error.headline]))

    if raw.level is None:
        return raw.replacing(f"{COMMAND_LINE}, --disable", enable=enabled), None
    bundle = choose_members(raw.level, enabled, raw.disable, known, attempt)
    origin = f"{COMMAND_LINE}, --level {raw.level}"
    return raw.replacing(origin, enable=[*enabled, *bundle.members]), bundle


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
        elif kind is Kind.MODEL and name not in catalogue and "model.family" not in raw.values:
            failures[name] = PluginResolutionError(
                f"{raw.hf_path}/config.json has model_type {name!r}, the name of no installed "
                "family; set model.family to one that fits, or install a plugin for it"
            )
    names = [name for name, _ in wanted]
    loaded = catalogue.load_each(name for name in names if name not in failures)
    return resolve(names, loaded.classes, {**loaded.failures, **failures})
