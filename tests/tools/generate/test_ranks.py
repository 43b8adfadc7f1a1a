"""A model on several ranks, against the same one on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import loaded_model
from ascend_run.tools.generate.model_options import ModelOptions
from tests.plugins.models.cases import BY_NAME
from tests.plugins.models.published import publish

from .rank_jobs import cancelled_on_ranks, found_by, on_ranks, resumed_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

VOCAB = 300
"""More than one rank's share of the vocabulary, which is padded to a multiple of 128 rows."""
LAYOUTS = {
    "tp": ModelOptions(tp=2),
    "pp": ModelOptions(pp=2),
    "dp": ModelOptions(nproc=2),
    "ep": ModelOptions(ep=2),
    "tp-ep": ModelOptions(tp=2, ep=2),
    "tp-pp": ModelOptions(tp=2, pp=2),
    "pp-dp": ModelOptions(pp=2, nproc=4),
    "pp-ep": ModelOptions(pp=2, ep=2),
}
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3")
FAMILIES = ("llama", "qwen2", "gemma3_text", "gpt2", "bloom", "mixtral", "phimoe", *LATENT)
CHANGES = {"qwen2": BY_NAME["qwen2"].variants["tied, one group, a window"]}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
CASES = [
    (name, layout, dtype)
    for name in FAMILIES
    for layout in LAYOUTS
    for dtype in TOLERANCES
    if "ep" not in layout or BY_NAME[name].experts
    if dtype is torch.float64 or name in ("llama", "gpt2", "mixtral")
]


def written(folder: Path, name: str) -> str:
    family = BY_NAME[name]
    model: Any = family.model(**{**CHANGES.get(name, {}), "vocab_size": VOCAB})
    model.save_pretrained(folder)
    if family.publish:
        publish(folder, family.publish, model.config)
    return str(folder)


def aspects(name: str, layout: str, dtype: torch.dtype) -> list[object]:
    """Of which each is in the suite: also a group of heads that ranks share, and latents."""
    kind = "latents" if name in LATENT else "one group" if name in CHANGES else ""
    return [*layout.split("-"), dtype, *((kind, size) for size in ("tp", "pp") if size in layout)]


@pytest.mark.exhaustive(by=aspects)
@pytest.mark.parametrize(("name", "layout", "dtype"), CASES, ids=str)
def test_logits_and_ids_on_ranks_are_those_of_one(
    name: str, layout: str, dtype: torch.dtype, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Of more sequences than replicas, and then of one, so that a replica has no token. In float32
    weights are packed."""
    folder, options = written(tmp_path, name), LAYOUTS[layout]
    torch.manual_seed(0)
    sequences = [torch.randint(VOCAB, (length,)).tolist() for length in (13, 8, 4)]
    batches = [sequences, sequences[:1]]
    with loaded_model(tmp_path, SourceOptions(family=name), dtype) as model:
        wanted = [found_by(model, batch) for batch in batches]
    arguments = (folder, name, options, batches, dtype)
    found, *others = gloo_pool.run(on_ranks, options.world_size, *arguments)
    assert others == [None] * (options.world_size - 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCES[dtype])


def test_a_cancelled_sequence_frees_its_pages_on_all_ranks(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    folder = written(tmp_path, "llama")
    (after, alone), _ = gloo_pool.run(cancelled_on_ranks, 2, folder, ModelOptions(tp=2))
    assert after == alone


def test_a_resumed_sequence_has_its_tokens_on_all_ranks(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    folder = written(tmp_path, "llama")
    (after, alone), _ = gloo_pool.run(resumed_on_ranks, 2, folder, ModelOptions(tp=2))
    assert after == alone
