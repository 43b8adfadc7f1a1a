"""Train on one rank of the pool, as a rank that the launcher has started; and the data for it."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run import __version__
from ascend_run.text.dataset_paths import bin_path, idx_path, sidecar_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.text.sidecar import FileDigest, Sidecar, encode_sidecar

from .gloo_on_device import gloo_on_device
from .kit import rank_environment

_DOCUMENTS: Final = 64
_LONGEST: Final = 60
"""Unit: tokens."""


def train_rank(handed_over: Mapping[str, Any]) -> None:
    """Run core's training on this rank. A job of the pool.

    Variables of ``ascend_environment`` are set, but torch is imported already, so those that it
    reads at import have no effect.

    Args:
        handed_over: JSON values of ``prepare.handed_over.HandedOver``, as from the launcher.
    """
    import torch.distributed as dist

    from ascend_run.core.hooks import Hooks
    from ascend_run.core.run import run_training
    from ascend_run.prepare.handed_over import HandedOver

    rank, size = dist.get_rank(), dist.get_world_size()
    with rank_environment(rank, size):
        request = HandedOver(**handed_over).run_request()
        variables = Hooks(request.plugins).merge(
            "ascend_environment", config=request.config, local_world_size=size
        )
        os.environ.update(variables)  # the pool restores the environment after each job
        with gloo_on_device(request.config.platform):
            run_training(request)


def counting_documents(vocab_size: int, seq_length: int) -> list[list[int]]:
    """Return short documents, each of which counts up or down: a model learns them. The last token
    of each is the end-of-document token.

    Args:
        vocab_size: The end-of-document token is the last id.
        seq_length: Of the run's samples; there are enough tokens for some of them.
    """
    draw, eod = random.Random(5), vocab_size - 1
    made = []
    for _ in range(max(_DOCUMENTS, seq_length)):
        first, stride = draw.randrange(eod), draw.choice((-2, -1, 1, 2, 3))
        length = draw.randint(2, _LONGEST)
        made.append([*((first + stride * index) % eod for index in range(length)), eod])
    return made


def write_dataset(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Write token files and their record, as ``ascend-run preprocess`` does.

    Args:
        prefix: Path without suffix; its folder must exist.
        vocab_size: Recorded with its last id as the end-of-document token.
    """
    dtype = dtype_for(vocab_size)
    with bin_path(prefix).open("wb") as stream:
        writer = IndexedWriter(stream, dtype)
        for document in documents:
            writer.add(document)
    index = writer.index()
    idx_path(prefix).write_bytes(index)
    record = Sidecar(
        tokenizer_sha256="made for a test, without a tokenizer",
        vocab_size=vocab_size,
        eod=vocab_size - 1,
        append_eod=False,
        dtype=dtype.name,
        documents=writer.documents,
        tokens=writer.tokens,
        bin=FileDigest(size_bytes=writer.tokens * dtype.itemsize, sha256=writer.bin_sha256),
        idx=FileDigest(size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()),
        ascend_run_version=__version__,
    )
    sidecar_path(prefix).write_bytes(encode_sidecar(record))
