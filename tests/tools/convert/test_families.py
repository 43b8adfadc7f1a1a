"""Every model family to every format and back, named once only: in the first conversion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import torch

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.entrypoints.cli import run
from ascend_run.tools.convert.model_config import load_family
from tests.plugins.models.cases import BY_NAME, FAMILIES, Family
from tests.plugins.models.published import BUFFERS, publish
from tests.support.family_checks import stored

FORMATS: Final = ("ascend-run", "mp-rank", "torch-dist")
_CHANGES: Final = {"deepseek_v3": {"rms_norm_eps": 1e-6}}
"""Family -> options with which Megatron computes it. Its norms of latents have this epsilon,
whatever the config says, and Megatron has one for all norms."""
PAGE: Final = Path(__file__).parents[3] / "docs" / "convert.md"


def of_the_page() -> dict[str, list[str]]:
    """Return each family that Megatron's formats lack -> what the refusal says, by the docs."""
    table = PAGE.read_text(encoding="utf-8").partition("| not in Megatron's formats |")[2]
    refused: dict[str, list[str]] = {}
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        names, reasons, _ = (re.findall("`(.+?)`", cell) for cell in line.strip("|").split("|"))
        refused |= dict.fromkeys(names, reasons)
    return refused


REFUSED: Final = of_the_page()
OF_A_SHARED_MODEL_TYPE: Final = [
    family.name for family in FAMILIES if load_family(family.name).model_type != family.name
]


def convert(*words: str | Path) -> int:
    return run(["convert", *map(str, words)])


def folder_of(family: Family, folder: Path) -> Path:
    """Write a random model of a family, with options away from their defaults."""
    changes = next(iter(family.variants.values()))
    model = family.model(**changes, **_CHANGES.get(family.name, {}))
    model.save_pretrained(folder)  # type: ignore[operator]
    if family.publish:
        publish(folder, family.publish, model.config)
    return folder


def check_returns(target: Path, theirs: Path, back: Path) -> None:
    """Check that a target says its family, and has every tensor of the source."""
    assert convert("--to", "hf", target, back) == 0
    want, got = stored(theirs), stored(back)
    assert got.keys() == want.keys() - {*BUFFERS}
    assert all(torch.equal(got[name], want[name]) for name in got)
    identity = ("model_type", "architectures")
    assert [read_hf_config(back)[key] for key in identity] == [
        read_hf_config(theirs)[key] for key in identity
    ]


@pytest.mark.parametrize("name", OF_A_SHARED_MODEL_TYPE)
def test_a_target_says_which_family_of_a_model_type_it_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = folder_of(BY_NAME[name], tmp_path / "theirs")
    for format_ in FORMATS if name not in REFUSED else FORMATS[:1]:
        target = tmp_path / format_
        verify = ("--verify", "tensors", "--family", name)
        assert convert("--to", format_, *verify, theirs, target) == 0
        assert f"{target}: {name}, step 0" in capsys.readouterr().out
        check_returns(target, theirs, tmp_path / f"from {format_}")


@pytest.mark.exhaustive(by=lambda name, format_: (format_, tuple(REFUSED.get(name, ()))))
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_family_returns_or_is_refused_as_the_page_says(
    name: str, format_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, target = folder_of(BY_NAME[name], tmp_path / "theirs"), tmp_path / "target"
    capsys.readouterr()
    done = convert("--to", format_, "--verify", "tensors", "--family", name, theirs, target)
    if format_ == "ascend-run" or name not in REFUSED:
        assert done == 0
        check_returns(target, theirs, tmp_path / "back")
        return
    said = capsys.readouterr().err
    assert (done, target.exists()) == (2, False)
    assert all(reason in said for reason in REFUSED[name]), said


def test_the_page_lists_families_and_gives_reasons() -> None:
    assert {*REFUSED} < {*BY_NAME}
    assert all(REFUSED.values())
