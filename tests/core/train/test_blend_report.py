"""What report says of a blend against the samples that the blend's order draws."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.core.data.samples import build_datasets
from ascend_run.plugin_api import Layout, RunContext
from ascend_run.plugins.tasks.pretrain.token_files import token_datasets
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.command import as_text
from ascend_run.tools.report.page import write_report
from tests.support.small_runs import prepare

from .runs import HALF, STEPS, Runs

NAMES = ("zero", "one", "two")
TOKENS = (900, 500, 250)


def write_constant(prefix: Path, token: int, tokens: int) -> str:
    """One document of one token, so that a sample identifies its dataset."""
    with bin_path(str(prefix)).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(90))
        writer.add([token] * tokens)
    idx_path(str(prefix)).write_bytes(writer.index())
    return str(prefix)


@pytest.mark.parametrize("weights", [[5.0, 2.0, 1.5], []], ids=["weights", "by tokens"])
def test_report_counts_what_a_resumed_blend_drew(
    gloo_pool: GlooPool, tmp_path: Path, weights: list[float]
) -> None:
    runs = Runs(gloo_pool, tmp_path, ({**DENSE, "train.micro_batch_size": 1}, 1, ()))
    prefixes = [write_constant(tmp_path / NAMES[n], n, TOKENS[n]) for n in range(3)]
    runs.data |= {"data.train": prefixes, "data.train_weights": weights}
    values = {**runs.values, **runs.data, "run.output_dir": str(tmp_path / "x")}
    config = prepare(values, (), 1).config
    batch, length = config.train.global_batch_size, config.data.seq_length
    cache = IndexCache.of_run(config)
    context = RunContext(config=config, layout=Layout(), device=None, groups=None, cache=cache)
    given = token_datasets(context, STEPS * batch, 0)
    samples = build_datasets(config, given, STEPS * batch, 0).train
    assert samples is not None
    drawn = [int(samples[i]["tokens"][0]) for i in range(STEPS * batch)]
    asked = weights or TOKENS

    for steps in (HALF, STEPS):  # the second one resumes
        runs("halves", train__train_iters=steps, checkpoint__save_interval=HALF)
        page = tmp_path / "page.html"
        (summary,) = write_report([read_run(tmp_path / "halves")], page)
        counts = Counter(drawn[: steps * batch])
        assert [each.samples for each in summary.blend] == [counts[n] for n in range(3)]
        for n, each in enumerate(summary.blend):
            per_epoch = (len(IndexedDataset(prefixes[n])[0]) - 1) // length
            assert (each.name, each.weight) == (prefixes[n], asked[n])
            assert each.share == pytest.approx(asked[n] / sum(asked), rel=1e-12)
            assert each.samples_share == counts[n] / (steps * batch)
            assert each.tokens == counts[n] * length
            assert each.epochs == counts[n] / per_epoch
            assert each.sentence() in as_text([summary], page)
            cells = page.read_text().split(f"<code>{prefixes[n]}</code>", 1)[1]
            assert f"<td>{counts[n] / per_epoch:.2f}</td>" in cells.split("</tr>")[0]
