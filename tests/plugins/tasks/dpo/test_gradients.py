"""The gradient of every parameter in each variant against trl, in float64; of pairs in rows of
their own and packed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ascend_run.testing.pool import GlooPool
from tests.support.pair_gradients import PAIRS, TrlGradients, assert_gradients_are_those_of
from tests.support.preference_files import write_models_and_pairs

from .test_against_trl import VARIANTS
from .test_training import values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("dpo"), PAIRS)


@pytest.mark.exhaustive(by=lambda variant, packing: [packing])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_gradient_is_that_of_trl(
    gloo_pool: GlooPool, models: Path, tmp_path: Path, variant: str, packing: bool
) -> None:
    """The reference has other weights: the ratios of both answers take part."""
    ours, theirs = VARIANTS[variant]
    reference = None if theirs.get("trainer") == "cpo" else "other"
    trl = TrlGradients(models=models, batch=PAIRS, **{**theirs, "reference": reference})
    options = {f"plugins__dpo__{name}": value for name, value in ours.items()}
    if reference is not None:
        options["plugins__dpo__reference"] = str(models / reference)
    run = partial(values, models, tmp_path / "run", plugins__dpo__packing=packing, **options)
    assert_gradients_are_those_of(gloo_pool, trl.model(tmp_path / "trl"), tmp_path, run, packing)
