"""The plugin in the guide for authors, as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.support.installed import Install
from tests.support.installed import install as install
from tests.support.marking import marking
from tests.support.probed_runs import Run, probe, train

GUIDE = Path(__file__).parent.parent.parent / "docs/plugin-authors.md"


def test_it_recomputes_each_layer_and_changes_no_bit(install: Install, tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(\"\"\".*?)```", GUIDE.read_text(), re.DOTALL)
    points = {"ascend_run.plugins": {"recompute-layers": "guide_plugin:RecomputeLayers"}}
    install("ascend-run-recompute", points, {"guide_plugin.py": source})
    attended: list[int] = []

    def up_to(step: int, name: str, **values: Any) -> Run:
        return train(
            tmp_path / name,
            probe("ascend_attention", lambda self, layer_index: marking(attended, layer_index)),
            values={
                "train.train_iters": step,
                "checkpoint.save_interval": 1,
                "optimizer.lr_decay_style": "constant",
                **values,
            },
        )

    plain = up_to(2, "plain").weights
    assert attended == [0, 1] * 2

    attended.clear()
    up_to(1, "recomputed", enable=["recompute-layers"])
    resumed = up_to(2, "recomputed", enable=["recompute-layers"]).weights
    assert attended == [0, 1, 1, 0] * 2
    names = {name.replace("_checkpoint_wrapped_module.", ""): name for name in resumed}
    assert names.keys() == plain.keys()
    assert all(torch.equal(resumed[name], plain[key]) for key, name in names.items())
