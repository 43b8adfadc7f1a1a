"""Megatron's own model loads what is written here, and what it saves is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.testing.pool import GlooPool
from tests.support.family_checks import stored

from . import megatron_jobs as jobs
from .biased_files import biased_hugging_face
from .megatron_files import hugging_face
from .test_mp_rank import check_equal, convert


@pytest.mark.timeout(400)  # four ranks import Megatron
@pytest.mark.parametrize(
    ("tp", "pp", "ep", "expert_tp", "tied", "latent"),
    [
        (2, 2, 1, None, True, ""),
        (2, 1, 2, None, False, ""),
        (2, 2, 1, None, False, "queries"),
        (2, 2, 2, 1, False, ""),
        (2, 1, 2, 2, False, ""),
    ],
    ids=["dense", "experts", "latent", "biases", "biases-expert-tp"],
)
def test_files_are_those_of_megatron(
    tp: int,
    pp: int,
    ep: int,
    expert_tp: int | None,
    tied: bool,
    latent: str,
    tmp_path: Path,
    gloo_pool: GlooPool,
) -> None:
    """Strictly loaded on four ranks; the files that Megatron saves give the first model again."""
    experts = ep > 1 or bool(latent)
    folder = tmp_path / "hf"
    if expert_tp:
        hf = biased_hugging_face(folder)
    else:
        hf = hugging_face(folder, experts=experts, tied=tied, latent=latent)
    given = {"tp": tp, "pp": pp, "ep": ep if ep > 1 else None, "expert-tp": expert_tp}
    sizes = [f"--{name}={size}" for name, size in given.items() if size]
    assert convert("--to", "mp-rank", *sizes, tmp_path / "hf", tmp_path / "ours") == 0
    assert convert("--to", "torch-dist", tmp_path / "hf", tmp_path / "dist") == 0
    theirs, iteration = tmp_path / "theirs", "iter_0000001"
    gloo_pool.run(
        jobs.load_and_save,
        4,
        str(tmp_path / "ours" / iteration),
        str(theirs),
        str(tmp_path / "dist" / iteration),
        tp=tp,
        pp=pp,
        ep=ep,
        expert_tp=expert_tp,
        tied=tied,
        latent=latent,
        timeout=300.0,
    )
    config = ("--config", tmp_path / "hf" / "config.json")
    for source, out in ((theirs, "a"), (theirs / "torch_dist", "b")):
        assert convert("--to", "hf", *config, source, tmp_path / out) == 0
        check_equal(stored(tmp_path / out), hf)
    # Not tensors alone: the args have enums of Megatron.
    assert b"megatron.core.enums" in next(theirs.glob("mp_rank_*/*.pt")).read_bytes()
