"""One file under two names is found, whatever the names; two files are never taken for one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.plugin_api import ConfigError
from ascend_run.text.file_collisions import NamedPath, file_collisions, refuse_collisions


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``real/file`` under more names, and links to what is not there yet."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "real" / "deep").mkdir(parents=True)
    (folder / "real" / "file").write_text("")
    (folder / "other").write_text("")
    (folder / "folder-link").symlink_to("real")
    (folder / "link").symlink_to(folder / "real" / "file")
    (folder / "hard").hardlink_to(folder / "real" / "file")
    (folder / "dangling").symlink_to("real/missing")
    (folder / "loop").symlink_to("loop")
    return folder


FILE = ("real/file", "./real//file", "real/deep/../file", "folder-link/file", "link", "hard")
MISSING = ("real/missing", "folder-link/missing", "real/deep/../missing", "dangling")
BELOW = ("real/a/b", "folder-link/a/b", "folder-link/deep/../a/b")
FILES: Sequence[Sequence[str]] = (
    FILE,
    MISSING,
    BELOW,
    ("other",),
    ("real/deep",),
    ("loop",),
    ("a\0b", "real/../a\0b"),
)
"""Names of one file each."""


@given(data=st.data())
def test_names_collide_where_they_are_of_one_file(folder: Path, data: st.DataObject) -> None:
    files = range(len(FILES))
    read, written = data.draw(st.sampled_from(files)), data.draw(st.sampled_from(files))
    source, target = (Path(data.draw(st.sampled_from(FILES[number]))) for number in (read, written))
    if data.draw(st.booleans()):
        source = folder / source
    with inside(folder):
        as_input = file_collisions([NamedPath("in", source)], [NamedPath("out", target)])
        as_output = file_collisions([], [NamedPath("a", source), NamedPath("b", target)])
    same = [f"out ({target}) would overwrite in ({source}); name another output"]
    assert as_input == (same if read == written else [])
    assert bool(as_output) == (read == written)


@pytest.mark.parametrize("target", ["real", "real/new", "folder-link/deep/new", "real/../real/x"])
def test_an_output_inside_a_folder_that_is_read_is_found(folder: Path, target: str) -> None:
    outputs = [NamedPath("TARGET", folder / target)]
    (problem,) = file_collisions([], outputs, [NamedPath("SOURCE", folder / "folder-link")])
    assert problem.startswith("TARGET (")
    assert f"is inside SOURCE ({folder / 'folder-link'})" in problem


@pytest.mark.parametrize("target", ["reality", "other", "new/real", "."])
def test_an_output_beside_or_around_a_folder_that_is_read_is_none(
    folder: Path, target: str
) -> None:
    outputs = [NamedPath("TARGET", folder / target)]
    assert file_collisions([], outputs, [NamedPath("SOURCE", folder / "real")]) == []


def test_every_collision_is_in_one_refusal(folder: Path) -> None:
    inputs = [NamedPath("one", folder / "real/file"), NamedPath("two", folder / "other")]
    names = ("link", "other", "new", "real/../new")
    with pytest.raises(ConfigError) as refusal:
        refuse_collisions(inputs, [NamedPath(name, folder / name) for name in names])
    assert len(refusal.value.problems) == 3
    assert refusal.value.exit_code == 2
    refuse_collisions(inputs, [NamedPath("new", folder / "new")])
