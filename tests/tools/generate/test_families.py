"""Logits of steps for every model family: against a whole forward, and against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import loaded_model
from tests.plugins.models.cases import BY_NAME, FAMILIES
from tests.plugins.models.published import publish

from .test_logits import logits_in_chunks, whole

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")


@pytest.mark.exhaustive(by=lambda name: (name[0], name == "deepseek_v3"))
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_chunks_of_a_family_are_as_its_whole_forward(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    model: Any = family.model(torch.float64)
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    torch.manual_seed(0)
    with loaded_model(tmp_path, SourceOptions(family=name), torch.float64) as loaded:
        vocab_size = loaded.config.model.vocab_size
        sequences = [torch.randint(vocab_size, (length,)).tolist() for length in (15, 8)]
        for got, ids in zip(logits_in_chunks(loaded, sequences, 3), sequences, strict=True):
            torch.testing.assert_close(got, whole(loaded, ids), rtol=0, atol=1e-10)
            with computing_in(torch.float64), torch.no_grad():
                want = model.eval()(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
