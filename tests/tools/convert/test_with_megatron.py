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


@pytest.mark.exhaustive(by=lambda case: ())
@pytest.mark.timeout(400)  # four ranks import Megatron
@pytest.mark.parametrize(
    "case",
    [
        jobs.Case(tp=2, pp=2, tied=True),
        jobs.Case(tp=2, ep=2),
        jobs.Case(tp=2, pp=2, latent="queries"),
        jobs.Case(tp=2, pp=2, ep=2, expert_tp=1),
        jobs.Case(tp=2, ep=2, expert_tp=2),
    ],
    ids=["dense", "experts", "latent", "biases", "biases-expert-tp"],
)
def test_files_are_those_of_megatron(case: jobs.Case, tmp_path: Path, gloo_pool: GlooPool) -> None:
    """Strictly loaded on four ranks; the files that Megatron saves give the first model again."""
    experts = case.ep > 1 or bool(case.latent)
    folder = tmp_path / "hf"
    if case.expert_tp:
        hf = biased_hugging_face(folder)
    else:
        hf = hugging_face(folder, experts=experts, tied=case.tied, latent=case.latent)
    ep = case.ep if case.ep > 1 else None
    given = {"tp": case.tp, "pp": case.pp, "ep": ep, "expert-tp": case.expert_tp}
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
        case,
        timeout=300.0,
    )
    config = ("--config", tmp_path / "hf" / "config.json")
    for source, out in ((theirs, "a"), (theirs / "torch_dist", "b")):
        assert convert("--to", "hf", *config, source, tmp_path / out) == 0
        check_equal(stored(tmp_path / out), hf)
    # Not tensors alone: the args have enums of Megatron.
    assert b"megatron.core.enums" in next(theirs.glob("mp_rank_*/*.pt")).read_bytes()
