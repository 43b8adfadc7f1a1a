"""Saving and resuming a run: what is in a checkpoint, and which one a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ascend_run.core.checkpoint import FileStore, GroupRanks, choose
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


class Checkpoints:
    """The checkpoints of one run. Every method is called on all ranks.

    Args:
        folder: The run folder; checkpoints go to ``checkpoints`` in it where the config names no
            other place.
    """

    def __init__(self, hooks: Hooks, context: c.RunContext, folder: Path) -> None:
        self.hooks, self.context = hooks, context
        options = context.config.checkpoint
        self.save_folder = options.save or str(folder / "checkpoints")
        self.load_folder = options.load or self.save_folder
        self.store = self._open(self.save_folder)

    def _open(self, folder: str) -> c.CheckpointStore:
        config = self.context.config
        store: c.CheckpointStore | None = self.hooks.provide(
            "ascend_checkpoint_store", config=config, folder=folder
        )
        return store or FileStore(
            folder,
            layout=self.context.layout,
            keep_last=config.checkpoint.keep_last,
            ranks=GroupRanks(device=self.context.device.torch_device),
        )

    def save(self) -> str:
        """Publish the run as it stands; the path."""
        entries = self._entries()
        return self.store.save(
            self.context.step, [*self._tensors(), *entries.pieces], entries.values
        )

    def restore(self, log: Any) -> None:
        """Go on from a checkpoint, or begin from a Hugging Face folder, or afresh.

        Raises:
            CheckpointError: The one asked for is missing or corrupt, or does not fit this model.
        """
        options = self.context.config.checkpoint
        store = self.store if self.load_folder == self.save_folder else self._open(self.load_folder)
        step = None
        if options.resume or options.step is not None:
            choice = choose(
                store,
                options.step,
                max_fallback=options.max_fallback,
                required=options.load is not None,
            )
            for corrupt in choice.corrupt:
                log.error("checkpoint.corrupt", step=corrupt.step, reason=corrupt.reason)
            step = choice.step
            if choice.newer:
                log.warning("checkpoint.older_than_newest", step=step, newer=list(choice.newer))
        if step is not None:
            self._load(store, step, log)
            log.info("checkpoint.resumed", step=step, folder=self.load_folder)
        elif self.context.config.model.hf_path is not None:
            self._load_hugging_face(log)
        else:
            log.info("weights.initialised", seed=self.context.config.run.seed)

    def _load(self, store: c.CheckpointStore, step: int, log: Any) -> None:
        """Fill models, optimizers and entries.

        The state of the random generators belongs to a rank: a run of another layout has other
        ranks, and draws from its seed instead.
        """
        moved = store.layout(step) != layout_sizes(self.context.layout)
        entries = self._entries(with_generators=not moved)
        values = store.load(
            step,
            [*self._tensors(), *entries.pieces],
            ignore_unused=("rng/*",) if moved else (),
        )
        entries.restore(values)
        if moved:
            log.warning("checkpoint.other_layout", step=step, drawn_anew="random generators")

    def _load_hugging_face(self, log: Any) -> None:
        config = self.context.config
        family = self.hooks.require("ascend_model_family")
        for bundle in self.context.models.values():
            load_model(config.model.hf_path, family, config, bundle)
            if bundle.trains:
                bundle.optimizer.reload_model_params()
        log.info("weights.loaded", folder=config.model.hf_path)

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

    def _entries(self, *, with_generators: bool = True) -> EntryPieces:
        policy = next(bundle for bundle in self.context.models.values() if bundle.trains)
        own: dict[str, c.CheckpointEntry] = {
            "progress": Progress(self.context, policy.optimizer, policy.scheduler)
        }
        if with_generators:
            own["rng"] = RandomState(
                DeviceGenerator(torch.cuda.get_rng_state, torch.cuda.set_rng_state),
                get_cuda_rng_tracker(),
            )
        plugins = self.hooks.merge("ascend_checkpoint_entries", context=self.context)
        if taken := sorted(own.keys() & plugins.keys()):
            raise HookError(
                "ascend_checkpoint_entries: the kernel has entries of these names; choose others",
                [repr(name) for name in taken],
            )
        return EntryPieces(own | plugins, self.context.layout.rank)
