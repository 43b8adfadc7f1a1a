"""Saving and resuming a run: what is in a checkpoint, and how it comes back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ascend_run.core.checkpoint import FileStore, GroupRanks
from ascend_run.core.checkpoint.entries import (
    DeviceGenerator,
    EntryPieces,
    Progress,
    RandomState,
)
from ascend_run.core.checkpoint.optimizer_pieces import optimizer_pieces
from ascend_run.core.checkpoint.regions import model_pieces, sharded_tensors
from ascend_run.core.checkpoint.store import layout_sizes
from ascend_run.core.convert.models import load_model
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError

from .beginning import find_beginning

_KERNELS = re.compile(r"progress|rng|(model|optimizer)(\..*)?")
_NAME = re.compile(r"[\w-][\w.-]*")


class Checkpoints:
    """The checkpoints of one run. Every method is called on all ranks.

    Args:
        folder: The run folder; checkpoints go to ``checkpoints`` in it where the config names no
            other place.

    Raises:
        HookError: A plugin's entry has a name that it cannot have.
    """

    def __init__(self, hooks: Hooks, context: c.RunContext, folder: Path) -> None:
        self.hooks, self.context = hooks, context
        options = context.config.checkpoint
        self.save_folder = options.save or str(folder / "checkpoints")
        self._ranks = GroupRanks(device=context.device.torch_device)
        self.store = self._open(self.save_folder)
        policy = next(bundle for bundle in context.models.values() if bundle.trains)
        self._of_plugins = self._plugins_entries()
        self._progress = Progress(context, policy.optimizer, policy.scheduler)

    def _open(self, folder: str) -> c.CheckpointStore:
        config = self.context.config
        store: c.CheckpointStore | None = self.hooks.provide(
            "ascend_checkpoint_store", config=config, folder=folder
        )
        own = store or FileStore(
            folder,
            layout=self.context.layout,
            keep_last=config.checkpoint.keep_last,
            ranks=self._ranks,
        )
        return self.hooks.wrap("ascend_checkpoint_transfer", own, context=self.context)

    def save(self, fingerprint: str | None = None) -> str:
        """Publish the run as it stands; the path.

        Args:
            fingerprint: Of the run's last step, for the manifest.
        """
        self._progress.fingerprint = fingerprint
        pieces, values = self.state()
        return self.store.save(self.context.step, pieces, values)

    def state(self) -> tuple[list[c.ShardPiece], dict[str, Any]]:
        """What a checkpoint of this rank holds now: tensors, which share their memory with the
        run's own, and values."""
        entries = self._entries()
        return [*self._tensors(), *entries.pieces], entries.values

    def restore(self, log: Any) -> None:
        """Go on from a checkpoint, or begin from a Hugging Face folder, or afresh.

        Raises:
            CheckpointError: The one asked for is missing or corrupt, or does not fit this model.
        """
        begin = find_beginning(
            self.context.config.checkpoint, self.store, self.save_folder, self._open
        )
        step = begin.choice.step
        for corrupt in begin.choice.corrupt:
            log.error("checkpoint.corrupt", step=corrupt.step, reason=corrupt.reason)
        if begin.choice.newer:
            log.warning("checkpoint.older_than_newest", step=step, newer=list(begin.choice.newer))
        if step is not None:
            if begin.instead_of is not None:
                log.warning("checkpoint.own_goes_first", step=step, passed_over=begin.instead_of)
            if self.context.config.model.hf_path is not None and self._leaves_weights_out():
                self._load_hugging_face(log)
            self._load(begin.store, step, log)
            if not begin.goes_on:
                self._progress.went_back_to = begin.went_back_to
            log.info("checkpoint.resumed", step=step, folder=begin.folder)
        elif self.context.config.model.hf_path is not None:
            self._load_hugging_face(log)
        else:
            log.info("weights.initialised", seed=self.context.config.run.seed)

    def _load(self, store: c.CheckpointStore, step: int, log: Any) -> None:
        """Fill models, optimizers and entries.

        An entry with tensors that belong to one rank, as the random generators are, begins anew
        in a run of another layout, whose ranks are others.
        """
        own = self._own_entries()
        entries = EntryPieces(own, self._ranks.rank)
        ignored: list[str] = []
        if moved := store.layout(step) != layout_sizes(self.context.layout):
            anew = self._on_any_rank(entries.of_this_rank)
            kept = {name: entry for name, entry in own.items() if name not in anew}
            entries = EntryPieces(kept, self._ranks.rank)
            ignored = [*(f"{name}/rank_*" for name in own), *(f"{name}/*" for name in anew)]
        values = store.load(step, [*self._tensors(), *entries.pieces], ignore_unused=ignored)
        entries.restore(values)
        if moved:
            log.warning("checkpoint.other_layout", step=step, begun_anew=anew)

    def _on_any_rank(self, names: set[str]) -> list[str]:
        """The names that any rank gives, on every rank."""
        given = self._ranks.gather(sorted(names))
        every = None if given is None else sorted({name for some in given for name in some})
        return list(self._ranks.broadcast(every))

    def _load_hugging_face(self, log: Any) -> None:
        config = self.context.config
        family = self.hooks.require("ascend_model_family")
        for bundle in self.context.models.values():
            load_model(config.model.hf_path, family, config, bundle)
            if bundle.trains:
                bundle.optimizer.reload_model_params()
        log.info("weights.loaded", folder=config.model.hf_path)

    def _leaves_weights_out(self) -> bool:
        """Whether checkpoints hold less than the models, so that the rest is what the run began
        with."""
        config = self.context.config
        for role, bundle in self.context.models.items():
            whole = model_pieces(sharded_tensors(bundle.chunks))
            kept = self.hooks.wrap("ascend_checkpoint_filter", whole, config=config, role=role)
            if len(kept) < len(whole):
                return True
        return False

    def _tensors(self) -> list[c.ShardPiece]:
        """Every model's and every optimizer's; the pieces share their memory."""
        config = self.context.config
        pieces: list[c.ShardPiece] = []
        first = next(iter(self.context.models))
        for role, bundle in self.context.models.items():
            suffix = "" if role == first else f".{role}"
            tensors = sharded_tensors(bundle.chunks, vocab_size=config.model.vocab_size)
            pieces += self.hooks.wrap(
                "ascend_checkpoint_filter",
                model_pieces(tensors, prefix=f"model{suffix}"),
                config=config,
                role=role,
            )
            if bundle.trains:
                pieces += optimizer_pieces(bundle.optimizer, tensors, prefix=f"optimizer{suffix}")
        return pieces

    def _entries(self) -> EntryPieces:
        return EntryPieces(self._own_entries(), self._ranks.rank)

    def _own_entries(self) -> dict[str, c.CheckpointEntry]:
        """The kernel's and the plugins'."""
        generators = RandomState(
            DeviceGenerator(torch.cuda.get_rng_state, torch.cuda.set_rng_state),
            get_cuda_rng_tracker(),
        )
        return {"progress": self._progress, "rng": generators, **self._of_plugins}

    def _plugins_entries(self) -> dict[str, c.CheckpointEntry]:
        """What plugins add.

        Raises:
            HookError: A name is the kernel's, is given twice, or cannot be one.
        """
        entries = self.hooks.merge("ascend_checkpoint_entries", context=self.context)
        problems = [
            f"{name!r}: the kernel has it" if _KERNELS.fullmatch(name) else f"{name!r}: not a name"
            for name in sorted(entries)
            if _KERNELS.fullmatch(name) or not _NAME.fullmatch(name)
        ]
        if problems:
            raise HookError("ascend_checkpoint_entries: choose other names", problems)
        return entries
