from __future__ import annotations

import pytest

from ascend_run.registry.discovery import discover
from ascend_run.registry.lock import plugin_lock
from ascend_run.registry.resolution import resolve
from tests.support.fake_distributions import make_distribution, plugin_source
from tests.support.installed import Install

POINTS = {"ascend_run.plugins": {"ring": "fake_ring:Plugin"}}


def lock_of_ring() -> dict[str, str]:
    catalogue = discover()
    return plugin_lock(resolve(["ring"], catalogue.load(["ring"])), catalogue)["ring"]


def test_the_lock_has_distribution_version_and_hash(install: Install) -> None:
    install("rings", POINTS, {"fake_ring.py": plugin_source("ring")}, version="1.5", record=True)

    lock = lock_of_ring()

    assert (lock["distribution"], lock["version"]) == ("rings", "1.5")
    assert len(lock["sha256"]) == 64


@pytest.mark.parametrize(
    "form", [{"record": True}, {"record": True, "editable": True}, {}], ids=str
)
def test_the_hash_follows_the_code(install: Install, form: dict[str, bool]) -> None:
    source = plugin_source("ring")
    modules = {"fake_ring/__init__.py": source, "fake_ring/kernels.py": "x = 1"}
    folder = install("rings", POINTS, modules, **form)
    first = lock_of_ring()
    (folder / "fake_ring/kernels.py").write_text("x = 2")
    if form == {"record": True}:  # as another build would be installed
        again = folder.parent / "again"
        modules["fake_ring/kernels.py"] = "x = 2"
        make_distribution(again, "rings", POINTS, modules, record=True)
        (folder / "rings-1.0.dist-info/RECORD").write_text(
            (again / "rings-1.0.dist-info/RECORD").read_text()
        )

    assert lock_of_ring()["sha256"] != first["sha256"]
    assert lock_of_ring() == lock_of_ring()


def test_the_hash_does_not_follow_the_place_of_the_installation(
    install: Install,
) -> None:
    folder = install("rings", POINTS, {"fake_ring.py": plugin_source("ring")}, record=True)
    first = lock_of_ring()
    record = folder / "rings-1.0.dist-info/RECORD"
    record.write_text(record.read_text() + "../../../bin/ring,sha256=abc,10\n")
    installer = folder / "rings-1.0.dist-info/INSTALLER"
    record.write_text(record.read_text() + f"{installer.relative_to(folder)},sha256=def,3\n")

    assert lock_of_ring() == first
