"""Write the pages of the model families from their records.

python -m scripts.family_pages            # writes docs/models.md and docs/plugins/models/*.md
python -m scripts.family_pages --check    # exits with 1 if a page is out of date

A page may have text of its own around the generated part; one that does not exist is made.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click

from ascend_run.plugin_api import Condition, ModelFamily, TensorMap
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind

DOCS: Final = Path(__file__).parent.parent / "docs"
INDEX: Final = DOCS / "models.md"
BEGIN, END = "<!-- family:begin -->", "<!-- family:end -->"
HEAD: Final = """# {name}

{text}

    [model]
    family = "{name}"
    hf_path = "/models/a-folder"   # config and weights; leave out to train from scratch

{begin}
{end}
"""
RULES: Final = """
The plugin only maps config keys and tensor names between Hugging Face and ascend-run. One engine
uses the maps for import and export ([Hugging Face folders](../../huggingface.md)).

| | |
| --- | --- |
| group | `ascend_run.models` |
| claims | {claims} |
| requires | {requires} |
| numerics | `model`: it defines the model |
| platforms | cpu; cuda unverified; npu by arithmetic ([platforms](../../platforms.md)) |
| source | {source} |

## Defaults

A `config.json` overrides these, and the config file or command line overrides both.

{defaults}

## Config keys

| `config.json` | ours | default |
| --- | --- | --- |
{keys}

Fixed: {fixed}.

Ignored, as outputs in evaluation do not depend on them: {ignored}.

Any other key is rejected by name.

## Tensors

In layers, N is `decoder.layers.<number>`{experts}.

| ours | Hugging Face | form | only with |
| --- | --- | --- | --- |
{tensors}
"""


_NEUTRAL: Final = {"model.norm_placement": "pre"}


def families() -> dict[str, Any]:
    """Return the plugin class of each built-in family, by name."""
    catalogue = discover()
    names = [n for n, f in catalogue.items() if f.first_party and f.kind is Kind.MODEL]
    loaded = catalogue.load(names)
    return {name: loaded[name] for name in sorted(names) if name == loaded[name].manifest.name}


def generated(plugin: Any) -> str:
    """Return the part of a family's page that follows from its record."""
    family: ModelFamily = plugin.family
    requires = [str(r) for r in plugin.manifest.requires if isinstance(r, Condition)]
    has_experts = any("{expert}" in name for tensor in family.tensors for name in tensor.hf)
    return RULES.format(
        claims=", ".join(f"`{claim}`" for claim in claims_of(plugin)),
        requires=", ".join(f"`{condition}`" for condition in requires) or "nothing",
        source=plugin.manifest.source,
        defaults=_listed(family.defaults),
        keys="\n".join(_keys(family)),
        fixed=", ".join(f"`{k}` = {_shown(v)}" for k, v in sorted(family.fixed.items())) or "none",
        ignored=", ".join(f"`{name}`" for name in sorted(family.ignored)),
        experts=" and E is an expert" if has_experts else "",
        tensors="\n".join(_row(family, tensor) for tensor in _possible(family)),
    ).strip()


def _listed(defaults: Mapping[str, object]) -> str:
    return "\n".join(f"    {name} = {_plain(value)}" for name, value in defaults.items())


def _keys(family: ModelFamily) -> Iterator[str]:
    for key in family.keys:
        note = f", as {key.form.name.replace('_', ' ')}" if key.form else ""
        if key.default is attrs.NOTHING:
            default = "required"
        else:
            default = "derived" if key.default is None else _shown(key.default)
        yield f"| `{key.hf}` | `{key.field}`{note} | {default} |"
    if any(key.hf == "rope_theta" for key in family.keys):
        yield (
            "| `rope_parameters.<name>`, `rope_scaling.<name>` | `model.rope_scaling_<name>` | "
            "not scaled |"
        )


def _possible(family: ModelFamily) -> Iterator[TensorMap]:
    """Yield the tensors without those whose option the family can never have."""
    for tensor in family.tensors:
        condition = tensor.condition
        if condition is None or _is_open(family, condition) or _holds(family, condition):
            yield tensor


def _is_open(family: ModelFamily, condition: Condition) -> bool:
    """Return whether a key of config.json decides."""
    return condition.field in {key.field for key in family.keys}


def _holds(family: ModelFamily, condition: Condition) -> bool:
    return condition.compares(family.defaults.get(condition.field, _NEUTRAL.get(condition.field)))


def _row(family: ModelFamily, tensor: TensorMap) -> str:
    ours = tensor.megatron.replace("decoder.layers.{layer}", "N")
    theirs = ", ".join(
        f"`{name.replace('{layer}', 'N').replace('{expert}', 'E')}`" for name in tensor.hf
    )
    form = tensor.form.replace("_", " ") + (", transposed" if tensor.transposed else "")
    only = [f"{tensor.layers} layers"] if tensor.layers != "all" else []
    if tensor.condition is not None and _is_open(family, tensor.condition):
        only.append(f"`{tensor.condition}`")
    return f"| `{ours}` | {theirs} | {form} | {', '.join(only)} |"


def _plain(value: object) -> str:
    return json.dumps(value)


def _shown(value: object) -> str:
    return f"`{_plain(value)}`"


def pages() -> dict[Path, str]:
    """Return the text of every page."""
    plugins = families()
    found = {INDEX: _index(plugins)}
    for name, plugin in plugins.items():
        path = DOCS / "plugins/models" / f"{name}.md"
        about = inspect.getdoc(sys.modules[plugin.__module__]) or ""
        head = HEAD.format(name=name, text=about, begin=BEGIN, end=END)
        old = path.read_text(encoding="utf-8") if path.exists() else head
        before, _, rest = old.partition(BEGIN)
        after = rest.partition(END)[2]
        found[path] = f"{before}{BEGIN}\n{generated(plugin)}\n{END}{after}"
    return found


def _index(plugins: Mapping[str, Any]) -> str:
    rows = []
    for name, plugin in plugins.items():
        about = (inspect.getdoc(sys.modules[plugin.__module__]) or "").split("\n")[0]
        others = "".join(f", `{alias}`" for alias in plugin.manifest.aliases)
        rows.append(
            f"| [`{name}`](plugins/models/{name}.md){others} | `{plugin.family.model_type}` | "
            f"`{plugin.family.architecture}` | {about} |"
        )
    text = INDEX.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table = "\n".join(["| family | `model_type` | class | |", "| --- | --- | --- | --- |", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page is outdated.")
def command(check: bool) -> None:
    """Write the pages."""
    old = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and old:
        names = ", ".join(str(path.relative_to(DOCS.parent)) for path in old)
        click.echo(f"out of date: {names}; run python -m scripts.family_pages", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
