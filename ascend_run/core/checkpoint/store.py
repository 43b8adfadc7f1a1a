"""The built-in checkpoint store: safetensors shards and a JSON manifest in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ascend_run.plugin_api import CheckpointError, Layout
from ascend_run.plugin_api.contracts import TensorShard

from . import folders
from .integrity import checkpoint_problems, read_manifest
from .loading import check_fit, fill
from .manifest import Manifest
from .ranks import Ranks, SingleRank, together
from .saving import Save

T = TypeVar("T")


class FileStore:
    """Checkpoints in a folder shared by all ranks. Every method must be called on all ranks.

    Args:
        folder: Created at the first save.
        layout: Layout of this run, recorded in each checkpoint.
        keep_last: Number of valid checkpoints to keep; 0 keeps all.
        ranks: Communication between the ranks; a single rank by default.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        keep_last: int = 2,
        ranks: Ranks | None = None,
    ) -> None:
        self.folder = os.path.abspath(folder)
        self._layout = layout_sizes(layout or Layout())
        self._keep_last = keep_last
        self._ranks = ranks or SingleRank()
        self._verified: set[str] = set()

    def steps(self) -> Sequence[int]:
        """Return the published steps, oldest first, as rank 0 sees them."""

        def look() -> list[int]:
            with folders.storage_errors(self.folder):
                return list(folders.published(self.folder))

        results = self._together(f"cannot list checkpoints in {self.folder}", look)
        return list(self._ranks.broadcast(None if results is None else results[0]))

    def save(self, step: int, shards: Sequence[TensorShard], values: Mapping[str, Any]) -> str:
        """Write, read back, publish and prune; return the path of the published checkpoint.

        Raises:
            CheckpointError: The shards of all ranks do not tile each tensor exactly once, or a
                value is not JSON; nothing was written.
            StorageError: Writing failed; earlier checkpoints are unchanged.
        """
        save = Save(self.folder, step, self._ranks, self._layout, self._keep_last)
        return save.run(shards, values)

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint; the files are divided among the ranks.

        Raises:
            CheckpointError: The checkpoint is missing or corrupt; names file and tensor.
        """
        self._verify(*self._find(step))

    def _verify(self, path: str, manifest: Manifest) -> None:
        headline = f"checkpoint {path} is corrupt"

        def check() -> None:
            files = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
            if problems := checkpoint_problems(path, manifest, files):
                raise CheckpointError(headline, problems)

        self._together(headline, check)
        self._verified.add(manifest.save_id)

    def layout(self, step: int) -> Mapping[str, int]:
        """Return the parallel sizes of the run that saved a checkpoint; see ``layout_sizes``."""
        return self._find(step)[1].layout

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint: layout, values, tensors.

        Raises:
            CheckpointError: The checkpoint is missing, or its manifest is corrupt.
        """
        return self._find(step)[1]

    def _find(self, step: int) -> tuple[str, Manifest]:
        """Return path and manifest of a published checkpoint."""
        headline = f"checkpoint {folders.step_path(self.folder, step)} is corrupt"
        if step not in (available := self.steps()):
            listed = ", ".join(map(str, available)) or "none"
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.folder}; available: {listed}"
            )
        found: list[tuple[str, Manifest]] = []

        def read() -> None:
            with folders.storage_errors(self.folder):
                path = folders.published(self.folder).get(step, "")
            found.append((path, read_manifest(path, step)))

        self._together(headline, read)
        return found[0]

    def load(
        self, step: int, shards: Sequence[TensorShard], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Fill the shards' tensors in place, for any saved layout, and return the JSON values.

        A checkpoint that this store has not verified yet is verified first.

        Args:
            ignore_unused: Patterns of keys (``rng/*``) that need not be read. Any other key that no
                rank requests is an error.

        Raises:
            CheckpointError: The checkpoint is corrupt or does not match the requested shards. Lists
                the first 20 problems over all ranks.
        """
        headline = f"cannot load checkpoint {folders.step_path(self.folder, step)}"
        path, manifest = self._find(step)
        check_fit(self._ranks, headline, manifest, shards, ignore_unused)
        if manifest.save_id not in self._verified:
            self._verify(path, manifest)
        self._together(headline, lambda: fill(path, manifest, shards))
        return manifest.values

    def _together(self, headline: str, work: Callable[[], T]) -> list[T] | None:
        return together(self._ranks, headline, work)


def layout_sizes(layout: Layout) -> dict[str, int]:
    """Return the sizes of a layout as recorded in the manifest, without this process's rank."""
    return {
        "world_size": layout.world_size,
        **layout.dense_axes,
        **layout.expert_axes,
        "vpp": layout.vpp or 1,
    }
