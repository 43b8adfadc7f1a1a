"""The kernel's own checkpoint store: safetensors shards and a JSON manifest in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_run.plugin_api import CheckpointError, Layout
from ascend_run.plugin_api.contracts import ShardPiece

from . import folders
from .loading import check_fit, fill
from .manifest import Manifest
from .ranks import Ranks, SingleRank, together
from .saving import Save
from .soundness import checkpoint_problems, read_manifest


class FileStore:
    """Checkpoints in a folder that every rank sees. Every method is called on all ranks.

    Args:
        folder: Created at the first save.
        layout: Of this run; recorded with each checkpoint.
        keep_last: How many sound checkpoints stay; 0 keeps all.
        ranks: How this run's ranks talk; alone by default.
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
        """Steps of the published checkpoints, oldest first; rank 0's view of the folder."""

        def look() -> list[int]:
            with folders.storage_errors(self.folder):
                return list(folders.published(self.folder))

        answers = self._together(f"cannot list checkpoints in {self.folder}", look)
        return list(self._ranks.broadcast(None if answers is None else answers[0]))

    def save(self, step: int, pieces: Sequence[ShardPiece], values: Mapping[str, Any]) -> str:
        """Write beside, read back, publish, prune; the path of the published checkpoint.

        Raises:
            CheckpointError: The pieces of all ranks do not tile each tensor exactly once, or a
                value is not JSON; nothing was written.
            StorageError: The file system refused; earlier checkpoints are as they were.
        """
        save = Save(self.folder, step, self._ranks, self._layout, self._keep_last)
        return save.run(pieces, values)

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint, the files shared out over the ranks.

        Raises:
            CheckpointError: It is missing or not sound; names file and tensor.
        """
        self._verify(*self._find(step))

    def _verify(self, path: str, manifest: Manifest) -> None:
        headline = f"checkpoint {path} is not sound"

        def check() -> None:
            files = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
            if problems := checkpoint_problems(path, manifest, files):
                raise CheckpointError(headline, problems)

        self._together(headline, check)
        self._verified.add(manifest.save_id)

    def layout(self, step: int) -> Mapping[str, int]:
        """Sizes of the parallel axes of the run that wrote a checkpoint; see ``layout_sizes``."""
        return self._find(step)[1].layout

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself: layout, values, tensors.

        Raises:
            CheckpointError: It is missing, or its manifest is not sound.
        """
        return self._find(step)[1]

    def _find(self, step: int) -> tuple[str, Manifest]:
        """Path and manifest of a published checkpoint."""
        headline = f"checkpoint {folders.step_path(self.folder, step)} is not sound"
        if step not in (there := self.steps()):
            listed = ", ".join(map(str, there)) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.folder}; there: {listed}")
        found: list[tuple[str, Manifest]] = []

        def read() -> None:
            with folders.storage_errors(self.folder):
                path = folders.published(self.folder).get(step, "")
            found.append((path, read_manifest(path, step)))

        self._together(headline, read)
        return found[0]

    def load(
        self, step: int, pieces: Sequence[ShardPiece], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Fill the pieces' tensors in place, whatever layout wrote them; the JSON values.

        A checkpoint that this store has not verified yet is verified first.

        Args:
            ignore_unused: Patterns of keys (``rng/*``) that may be left unread; any other key
                that no rank asks for is an error.

        Raises:
            CheckpointError: It is not sound, or does not fit; lists the first 20 misfits of all
                ranks.
        """
        headline = f"cannot load checkpoint {folders.step_path(self.folder, step)}"
        path, manifest = self._find(step)
        check_fit(self._ranks, headline, manifest, pieces, ignore_unused)
        if manifest.save_id not in self._verified:
            self._verify(path, manifest)
        self._together(headline, lambda: fill(path, manifest, pieces))
        return manifest.values

    def _together(self, headline: str, work: Any) -> list[Any] | None:
        return together(self._ranks, headline, work)


def layout_sizes(layout: Layout) -> dict[str, int]:
    """The sizes of a layout as the manifest records them: without this process's rank."""
    return {
        "world_size": layout.world_size,
        **layout.dense_axes,
        **layout.expert_axes,
        "vpp": layout.vpp or 1,
    }
