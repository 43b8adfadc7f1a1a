from __future__ import annotations

import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from ascend_run.plugin_api import PluginLoadError, PluginResolutionError
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer

CANARY = """
    from pathlib import Path
    Path(__file__).with_name("ran").touch()
"""


def test_our_own_plugins_are_found_with_their_group_and_distribution() -> None:
    found = discover()

    assert found["cpu"].kind is Kind.PLATFORM
    assert found["pretrain"].kind is Kind.TASK
    assert found["llama"].kind is Kind.MODEL
    assert found["cpu"].distribution == "ascend-run"
    assert all(candidate.first_party for candidate in found.values())


def test_discovery_runs_no_code_of_an_installed_package(install: Install) -> None:
    folder = offer(install, "ring", CANARY)

    found = discover()

    assert found["ring"].offered_by == "ascend-run-ring 1.0"
    assert not found["ring"].first_party
    assert not (folder / "ran").exists()


def test_only_named_plugins_are_imported(install: Install) -> None:
    quiet = offer(install, "quiet", CANARY + plugin_source("quiet"))
    offer(install, "named", plugin_source("named"))

    loaded = discover().load(["named"])

    assert [*loaded] == ["named"]
    assert not (quiet / "ran").exists()


def test_the_canary_can_sing(install: Install) -> None:
    folder = offer(install, "loud", CANARY)

    discover().load_each(["loud"])

    assert (folder / "ran").exists()


def test_a_package_cannot_pass_for_ours_by_its_module_name_alone(install: Install) -> None:
    points = {"ascend_run.plugins": {"sly": "ascend_run.plugins.sly:Plugin"}}
    install("ascend-run-sly", points)

    assert not discover()["sly"].first_party


def test_a_package_cannot_pass_for_ours_by_the_name_in_its_metadata(install: Install) -> None:
    folder = install("sly", {"ascend_run.plugins": {"sly": "ascend_run.plugins.sly:Plugin"}})
    (folder / "sly-1.0.dist-info/METADATA").write_text("Name: ascend-run\nVersion: 1.0\n")

    found = discover()

    assert "sly" not in found
    assert "they are in the folder of 'sly'" in found.unreadable["ascend-run"]


def test_a_name_offered_by_two_distributions_is_refused_naming_both(install: Install) -> None:
    points = {"ascend_run.plugins": {"ring": "fake_ring:Plugin"}}
    install("ring-one", points, {"fake_ring.py": plugin_source("ring")}, version="1.5")
    install("ring-two", {"ascend_run.tasks": {"ring": "other:Plugin"}}, version="2.0")

    found = discover()

    assert "ring" not in found
    with pytest.raises(PluginLoadError) as refusal:
        found.load(["ring"])
    assert "ring-one 1.5" in str(refusal.value)
    assert "ring-two 2.0" in str(refusal.value)
    assert "fake_ring" not in sys.modules


def test_a_name_offered_twice_stops_no_run_that_does_not_name_it(install: Install) -> None:
    offer(install, "good", plugin_source("good"))
    install("ring-one", {"ascend_run.plugins": {"ring": "a:A"}})
    install("ring-two", {"ascend_run.plugins": {"ring": "b:B"}})

    found = discover()

    assert [*found.load(["good"])] == ["good"]
    assert [*found.broken] == ["ring"]


def test_the_importable_of_two_installed_distributions_counts(
    install: Install,
) -> None:
    install("ring-one", {"ascend_run.plugins": {"ring": "old:Plugin"}}, version="1.0")
    install("Ring_One", {"ascend_run.plugins": {"ring": "new:Plugin"}}, version="2.0")

    found = discover()

    assert found["ring"].value == "new:Plugin"
    assert found["ring"].version == "2.0"


def test_an_installation_without_plugins_hides_another_of_its_name(install: Install) -> None:
    install("ring-one", {"ascend_run.plugins": {"ring": "old:Plugin"}}, version="1.0")
    install("Ring_One", {}, version="2.0")

    found = discover()

    assert "ring" not in found
    assert not found.unreadable


def test_the_metadata_of_a_distribution_is_read_once(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("ring-one", {"ascend_run.plugins": {"ring": "old:Plugin"}})
    read: list[str] = []
    original = PathDistribution.read_text

    def recording(self: PathDistribution, filename: str) -> str | None:
        read.extend([filename] if Path(str(self.locate_file(""))) == folder else [])
        return original(self, filename)

    monkeypatch.setattr(PathDistribution, "read_text", recording)
    assert "ring" in discover()
    assert read.count("METADATA") == 1


def test_unreadable_metadata_stops_no_other_plugin(install: Install) -> None:
    folder = install("broken-metadata", {"ascend_run.plugins": {"x": "x:X"}})
    (folder / "broken_metadata-1.0.dist-info/entry_points.txt").write_text(
        "[ascend_run.plugins]\nno equals sign here\n"
    )

    found = discover()

    assert "cpu" in found
    assert [*found.unreadable] == ["broken-metadata"]


def test_a_distribution_without_a_name_stops_no_other_plugin(install: Install) -> None:
    folder = install("nameless", {"ascend_run.plugins": {"x": "x:X"}})
    (folder / "nameless-1.0.dist-info/METADATA").write_text("Version: 1.0\n")

    found = discover()

    assert "cpu" in found
    assert any("nameless" in place for place in found.unreadable)


def test_an_unknown_name_is_rejected_with_the_nearest_and_the_locations() -> None:
    with pytest.raises(PluginResolutionError) as refusal:
        discover().load(["pretrian"])

    message = str(refusal.value)
    assert "unknown plugin 'pretrian'; nearest: pretrain" in message
    assert "ascend_run.plugins" in message
    assert "ascend-run 0.1.0" in message
    assert sys.prefix in message


@pytest.mark.parametrize("name", ["chunked-loss", "loss-chunk"])
def test_a_name_of_what_is_a_setting_is_answered_with_it(name: str) -> None:
    """And with no plugin that has a few letters of it."""
    with pytest.raises(PluginResolutionError) as refusal:
        discover().load([name])

    setting = "without a plugin there is the setting train.loss_chunk_bytes (docs/loss.md)"
    assert f"unknown plugin '{name}'; {setting}; searched the entry" in str(refusal.value)
    assert Path(__file__).parents[2].joinpath("docs/loss.md").is_file()


def test_a_name_of_nothing_is_answered_with_no_guess() -> None:
    with pytest.raises(PluginResolutionError, match="plugin 'the-loss'; searched the entry"):
        discover().load(["the-loss"])


def test_every_bad_name_is_in_one_refusal(install: Install) -> None:
    offer(install, "bad", "raise ValueError('no\\n luck')")

    with pytest.raises(PluginResolutionError) as refusal:
        discover().load(["nowhere", "bad", "pretrian"])

    assert len(refusal.value.problems) == 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("import sys; sys.exit(3)", "called sys.exit(3)"),
        ("assert 1 == 2", "AssertionError"),
        ("import a_module_that_is_nowhere", "No module named 'a_module_that_is_nowhere'"),
        ("def broken(:", "SyntaxError"),
        ("x = 1", "has no attribute 'Plugin'"),
        ("Plugin = 3", "is not a plugin"),
        ("class Plugin: manifest = 'ring'", "is not a plugin"),
    ],
)
def test_a_plugin_that_cannot_be_imported_stops_only_runs_that_name_it(
    install: Install, source: str, reason: str
) -> None:
    offer(install, "bad", source)
    offer(install, "good", plugin_source("good"))

    loaded = discover().load_each(["bad", "good"])

    assert [*loaded.classes] == ["good"]
    assert isinstance(loaded.failures["bad"], PluginLoadError)
    assert reason in str(loaded.failures["bad"])
    assert "ascend-run-bad 1.0" in str(loaded.failures["bad"])


def test_ctrl_c_during_an_import_is_no_broken_plugin(install: Install) -> None:
    press = "import signal; signal.raise_signal(signal.SIGINT)"
    offer(install, "slow", press)

    with pytest.raises(KeyboardInterrupt):
        discover().load_each(["slow"])


def test_a_plugin_for_another_api_is_refused_with_both_versions(install: Install) -> None:
    offer(install, "future", plugin_source("future", "requires_api='>=7,<9'"))

    with pytest.raises(PluginLoadError) as refusal:
        discover().load(["future"])

    (problem,) = refusal.value.problems
    assert problem == (
        "'future' of ascend-run-future 1.0 requires plugin API >=7,<9 and this is API 0; install "
        "a release of ascend-run-future for it, or one of ascend-run with that API"
    )


def test_fields_of_a_newer_api_are_named_with_what_to_do(install: Install) -> None:
    offer(install, "future", plugin_source("future", "rank_groups=(), sumary='x'"))

    with pytest.raises(PluginLoadError) as refusal:
        discover().load(["future"])

    (problem,) = refusal.value.problems
    assert problem == (
        "'future' of ascend-run-future 1.0 was written for a newer plugin API: unknown field(s) "
        "rank_groups, sumary (did you mean summary?) in its manifest, and this is API 0; install "
        "a newer ascend-run, or a release of ascend-run-future for this API"
    )


def test_an_entry_point_must_have_a_name_of_its_manifest(install: Install) -> None:
    offer(install, "ring", plugin_source("circle"))

    with pytest.raises(PluginLoadError, match="manifest for other names"):
        discover().load(["ring"])


def test_an_alias_loads_the_same_class(install: Install) -> None:
    points = {"ascend_run.plugins": {"ring": "fake_ring:Plugin", "circle": "fake_ring:Plugin"}}
    install("rings", points, {"fake_ring.py": plugin_source("ring", "aliases=('circle',)")})

    loaded = discover().load(["ring", "circle"])

    assert loaded["ring"] is loaded["circle"]


def test_an_alias_cannot_take_the_place_of_another_plugin(install: Install) -> None:
    offer(install, "sly", plugin_source("cpu", "aliases=('sly',)"))

    with pytest.raises(PluginLoadError, match="no entry point to the same class"):
        discover().load(["sly"])


def test_a_plugin_in_the_wrong_group_is_refused(install: Install) -> None:
    points = {"ascend_run.platforms": {"ring": "fake_ring:Plugin"}}
    install("rings", points, {"fake_ring.py": plugin_source("ring")})

    with pytest.raises(PluginLoadError, match=r"belongs in ascend_run\.plugins"):
        discover().load(["ring"])


def test_options_must_be_an_attrs_class(install: Install) -> None:
    offer(install, "odd", plugin_source("odd") + "\nPlugin.config_class = dict\n")

    with pytest.raises(PluginLoadError, match="must be an attrs class"):
        discover().load(["odd"])


def test_no_cache_file_is_read_or_written(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    offer(install, "good", plugin_source("good"))

    discover().load(["good"])

    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "home").exists()
