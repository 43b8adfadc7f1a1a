"""Save and resume a run: the contents of a checkpoint and how they are restored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_run.core.checkpoint import FileStore, GroupRanks
from ascend_run.core.checkpoint.entries import (
    PROGRESS,
    EntryShards,
    PluginEntry,
    Progress,
    SavedProgress,
)
from ascend_run.core.checkpoint.optimizer_shards import materialized, optimizer_shards
from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
from ascend_run.core.checkpoint.store import layout_sizes
from ascend_run.core.hooks import Hooks
from ascend_run.core.hugging_face.models import load_model
from ascend_run.ops.weight_sources import other_sources, weight_source
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import CheckpointError, HookError

from .seeding import random_state
from .starting_point import find_starting_point

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_RESERVED = re.compile(r"progress|rng|(model|optimizer)(\..*)?")
_NAME = re.compile(r"[\w-][\w.-]*")


class Checkpoints:
    """The checkpoints of one run. Every method must be called on all ranks.

    Args:
        folder: The run folder. Checkpoints go to its ``checkpoints`` subfolder unless the config
            names another.

    Raises:
        HookError: A plugin's checkpoint entry has an invalid name.
    """

    def __init__(self, hooks: Hooks, context: c.RunContext, folder: Path) -> None:
        self.hooks, self.context = hooks, context
        options = context.config.checkpoint
        self.save_folder = options.save or str(folder / "checkpoints")
        self._ranks = GroupRanks(device=context.device.torch_device)
        self.store = self._open(self.save_folder)
        self._plugin_entries = self._collect_plugin_entries()
        choices = hooks.merge("ascend_machine_choices", config=context.config)
        seed = context.config.run.seed
        frozen = {role: weight_source(model.weights, seed) for role, model in self._frozen.items()}
        self._progress = Progress(context, self._trained, choices, frozen)

    def _open(self, folder: str) -> c.CheckpointStore:
        config = self.context.config
        own: c.CheckpointStore = FileStore(
            folder,
            layout=self.context.layout,
            keep_last=config.checkpoint.keep_last,
            ranks=self._ranks,
        )
        return self.hooks.wrap("ascend_checkpoint_transfer", own, context=self.context)

    def save(self, fingerprint: str | None = None) -> str:
        """Save a checkpoint and return its path.

        Args:
            fingerprint: Fingerprint of the last step, stored in the manifest.
        """
        self._progress.fingerprint = fingerprint
        with self.state() as (shards, values):
            return self.store.save(self.context.step, shards, values)

    @contextmanager
    def state(self) -> Iterator[tuple[list[c.TensorShard], dict[str, object]]]:
        """Give this rank's checkpoint contents: tensors, which share the run's memory, and values.

        Master weights are in these tensors only for the duration.
        """
        entries = EntryShards(self._all_entries(), self._ranks.rank)
        with self._tensors() as shards:
            yield [*shards, *entries.shards], entries.values

    def restore(self, log: FilteringBoundLogger) -> None:
        """Restore a checkpoint, or load Hugging Face weights, or keep the initial weights.

        Raises:
            CheckpointError: The requested checkpoint is missing, corrupt, or does not match the
                model.
        """
        start = find_starting_point(
            self.context.config.checkpoint, self.store, self.save_folder, self._open
        )
        self._load_hugging_face(self._frozen, log)
        step = start.choice.step
        for corrupt in start.choice.corrupt:
            log.error("checkpoint.corrupt", step=corrupt.step, reason=corrupt.reason)
        if start.choice.newer:
            log.warning("checkpoint.older_than_newest", step=step, newer=list(start.choice.newer))
        if step is not None:
            if start.overridden is not None:
                log.warning("checkpoint.own_goes_first", step=step, passed_over=start.overridden)
            has_folder = any(model.weights for model in self._trained.values())
            if has_folder and self._filters_drop_weights():
                self._load_hugging_face(self._trained, log)
            progress = self._load(start.store, step, log)
            if not start.continues:
                self._progress.went_back_to = start.went_back_to
            elif problems := [*other_sources(progress.frozen, self._progress.frozen)]:
                raise CheckpointError("the run cannot resume beside another model", problems)
            log.info("checkpoint.resumed", step=step, folder=start.folder)
        elif not self._load_hugging_face(self._trained, log):
            log.info("weights.initialised", seed=self.context.config.run.seed)

    def _load(
        self, store: c.CheckpointStore, step: int, log: FilteringBoundLogger
    ) -> SavedProgress:
        """Load models, optimizers and entries.

        If the parallel layout differs from the saved one, entries with per-rank tensors, such as
        the random generators, are reinitialized.
        """
        own = self._all_entries()
        entries = EntryShards(own, self._ranks.rank)
        ignored: list[str] = []
        if moved := store.layout(step) != layout_sizes(self.context.layout):
            reinitialized = self._union_over_ranks(entries.of_this_rank)
            kept = {name: entry for name, entry in own.items() if name not in reinitialized}
            entries = EntryShards(kept, self._ranks.rank)
            ignored = [
                *(f"{name}/rank_*" for name in own),
                *(f"{name}/*" for name in reinitialized),
            ]
        with self._tensors() as shards:
            values = store.load(step, [*shards, *entries.shards], ignore_unused=ignored)
        entries.restore(values)
        if moved:
            log.warning("checkpoint.other_layout", step=step, begun_anew=reinitialized)
        progress = SavedProgress.read(values[PROGRESS])
        self._warn_of_other_choices(progress, log)
        return progress

    def _warn_of_other_choices(self, progress: SavedProgress, log: FilteringBoundLogger) -> None:
        """Warn of each choice that this machine makes differently from the one that saved: rounding
        differs from this step on."""
        for option, now in self._progress.machine_choices.items():
            if (saved := progress.machine_choices.get(option, "unknown")) != now:
                same = "what it was then" if saved == "unknown" else saved
                log.warning(
                    "checkpoint.other_machine_choice",
                    option=option,
                    saved=saved,
                    now=now,
                    fix=f"set {option}={same} to continue with the same numbers",
                )

    def _union_over_ranks(self, names: set[str]) -> list[str]:
        """Return, on every rank, the union of all ranks' names."""
        given = self._ranks.gather(sorted(names))
        every = None if given is None else sorted({name for some in given for name in some})
        return list(self._ranks.broadcast(every))

    def _load_hugging_face(
        self, models: Mapping[str, c.ModelBundle], log: FilteringBoundLogger
    ) -> bool:
        """Load the models that have a folder of weights; return whether there were any."""
        family, loaded = self.hooks.require("ascend_model_family"), False
        for role, bundle in models.items():
            if bundle.weights is not None and bundle.chunks:
                lacking = load_model(bundle.weights, family, bundle.config, bundle)
                if bundle.optimizer is not None:
                    bundle.optimizer.reload_model_params()
                log.info("weights.loaded", folder=bundle.weights, role=role)
                if lacking:
                    log.info("weights.begun_anew", parameters=lacking, role=role)
                loaded = True
        return loaded

    def _filters_drop_weights(self) -> bool:
        """Return whether checkpoint filters leave out weights.

        A resumed run then also needs the initial weights.
        """
        for role, bundle in self._trained.items():
            whole = sharded_tensors(bundle.chunks, stored=True)
            kept = model_shards(sharded_tensors(bundle.chunks))
            asked = {"config": bundle.config, "role": role}
            kept = self.hooks.wrap("ascend_checkpoint_filter", kept, **asked)
            if len(kept) < len(model_shards(whole)):
                return True
        return False

    @contextmanager
    def _tensors(self) -> Iterator[list[c.TensorShard]]:
        """Give the shards of all models and optimizers; they share the run's memory."""
        with ExitStack() as stack:
            for bundle in self._trained.values():
                stack.enter_context(materialized(bundle.optimizer))
            yield self._shards()

    def _shards(self) -> list[c.TensorShard]:
        shards: list[c.TensorShard] = []
        first = next(iter(self._trained))
        for role, bundle in self._trained.items():
            suffix = "" if role == first else f".{role}"
            tensors = sharded_tensors(bundle.chunks, vocab_size=bundle.config.model.vocab_size)
            shards += self.hooks.wrap(
                "ascend_checkpoint_filter",
                model_shards(tensors, prefix=f"model{suffix}"),
                config=bundle.config,
                role=role,
            )
            if bundle.trains:
                spec = bundle.optimizer_spec
                shards += optimizer_shards(
                    bundle.optimizer,
                    tensors,
                    prefix=f"optimizer{suffix}",
                    declared=None if spec is None else spec.states,
                )
        return shards

    @property
    def _trained(self) -> dict[str, c.ModelBundle]:
        return {role: model for role, model in self.context.models.items() if not model.frozen}

    @property
    def _frozen(self) -> dict[str, c.ModelBundle]:
        return {role: model for role, model in self.context.models.items() if model.frozen}

    def _all_entries(self) -> dict[str, c.CheckpointEntry]:
        """Return the checkpoint entries of the kernel and the plugins."""
        return {PROGRESS: self._progress, "rng": random_state(), **self._plugin_entries}

    def _collect_plugin_entries(self) -> dict[str, c.CheckpointEntry]:
        """Return the checkpoint entries that plugins add.

        Raises:
            HookError: A name is reserved by the kernel, duplicated or invalid.
        """
        hook = "ascend_checkpoint_entries"
        entries = self.hooks.merge_named(hook, context=self.context)
        problems = [
            f"{name!r}: the kernel has it" if _RESERVED.fullmatch(name) else f"{name!r}: not a name"
            for name in sorted(entries)
            if _RESERVED.fullmatch(name) or not _NAME.fullmatch(name)
        ]
        if problems:
            raise HookError(f"{hook}: choose other names", problems)
        return {
            name: PluginEntry(entry, self.hooks.naming(hook, plugin))
            for name, (plugin, entry) in entries.items()
        }
