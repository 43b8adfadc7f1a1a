"""What each plugin says of the flags of the reference systems can be carried out: its keys are
options, and the values that it names are accepted by them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from ascend_run.plugin_api.legacy_flags import ANY, ENABLE, LegacyFlag
from ascend_run.prepare.config.raw import RawValue
from ascend_run.prepare.config.schema import TOP_LEVEL, all_options
from ascend_run.registry.discovery import discover
from tests.support.plugin_pages import page_of

CATALOGUE: Final = discover()
OURS: Final = CATALOGUE.load([n for n, found in CATALOGUE.items() if found.first_party])
OPTIONS: Final = all_options(
    {name: getattr(plugin, "config_class", None) for name, plugin in OURS.items()}
)
TYPES: Final[dict[str, Any]] = {
    **TOP_LEVEL,
    **{key: option.type for key, option in OPTIONS.items()},
    ENABLE: bool,
}


def records() -> Iterator[Any]:
    for name, plugin in OURS.items():
        for index, record in enumerate(plugin.manifest.legacy_flags):
            if name == plugin.manifest.name:
                yield pytest.param(name, record, id=f"{name} {index} {record.flag}")


@pytest.mark.parametrize(("plugin", "record"), [*records()])
def test_a_flag_sets_a_key_that_exists_to_a_value_it_takes(plugin: str, record: LegacyFlag) -> None:
    if not record.key:
        assert record.values == {}
        return
    assert record.key in TYPES
    if record.key.startswith("plugins."):
        assert record.key.split(".")[1] == plugin
    name = record.key.rpartition(".")[2]
    for value in (record.values or {}).values():
        RawValue(value, "the flag").structured(TYPES[record.key], name)
    if record.plus:
        assert RawValue(record.plus, "the flag").structured(TYPES[record.key], name) == record.plus
    assert record.values != {}
    assert record.key != ENABLE or record.values is not None


@pytest.mark.parametrize(("plugin", "record"), [*records()])
def test_a_value_that_follows_a_flag_is_one_word(plugin: str, record: LegacyFlag) -> None:
    words = [*(record.values or {}), *record.where.values()]
    assert all(word in (None, "", ANY) or len(word.split()) == 1 for word in words)
    assert all(flag.startswith("--") for flag in record.where)


@pytest.mark.parametrize("plugin", sorted({*OURS}))
def test_the_page_of_a_plugin_names_its_flags(plugin: str) -> None:
    flags = {record.flag for record in OURS[plugin].manifest.legacy_flags}
    page = page_of(CATALOGUE, OURS[plugin].manifest.name).read_text(encoding="utf-8")
    assert flags - {*re.findall(r"--[\w-]+", page)} == set()


def test_words_for_one_flag_enable_one_plugin() -> None:
    """Among plugins that a flag chooses from, such as the algorithms of context parallelism."""
    chosen = [
        (record.flag, word, *sorted(record.where.items()))
        for name, plugin in OURS.items()
        if name == plugin.manifest.name
        for record in plugin.manifest.legacy_flags
        if record.key == ENABLE and record.values is not None
        for word, enabled in record.values.items()
        if enabled and word
    ]
    assert len(chosen) == len({*chosen})
