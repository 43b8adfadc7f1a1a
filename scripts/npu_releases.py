"""Read the operator schemas of every torch_npu release from its wheels in the package registry.

    python scripts/npu_releases.py              # reads releases that are not in build/npu_releases
    python scripts/npu_releases.py --from-cache   # rewrites the record without downloads

Each wheel (25 to 45 MB) is downloaded by pip without dependencies, searched for operator schemas,
and deleted before the next one. It is neither installed nor imported. The schemas are stored under
``build/npu_releases``, one file per release. Those of the operators that platform npu calls, and of
similar ones, go to ``ascend_run/plugins/platforms/npu/proof/releases.json``, each schema once with
the ranges of releases that have it. Release candidates are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import click
from packaging.version import Version

from ascend_run.plugins.platforms.npu.gaps import RECORD, as_ranges
from ascend_run.plugins.platforms.npu.proof.libraries import LIBRARIES, merged, schema_strings

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build/npu_releases"
OLDEST = Version("2.7")
KEPT = re.compile(
    r"(empty_with_swapped_memory|npu_(fusion_attention|fused_infer_attention|rms_norm|add_rms_norm|add_layer_norm|layer_norm"
    r"|swiglu|gelu|geglu|rotary|apply_rotary|rotate|grouped_matmul|quant_grouped|moe_token|dropout"
    r"|moe_init_routing|moe_finalize_routing|moe_gating|ring_attention|mm_all_reduce|bmm_reduce"
    r"|mm_reduce_scatter|all_gather_base_mm|alltoall|all_to_all|quant_matmul|weight_quant|ffn"
    r"|bmmV2|linear|apply_adam|matmul|dynamic_quant|quantize|anti_quant|transpose_batchmatmul"
    r"|format_cast|swiglu_quant|dequant_swiglu|group_quant|trans_quant)\w*)(\.\w+)?$"
)
"""Operators of the kinds in our table."""


def offered() -> list[str]:
    """Return final and post releases that pip finds, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch_npu"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"Available versions: (.+)", output)
    versions = (Version(name) for name in line.split(", "))
    return [str(v) for v in sorted(versions) if v >= OLDEST and not v.is_prerelease]


def schemas_of(release: str) -> dict[str, str]:
    """Return the schemas in a release's libraries."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary", ":all:", "--python-version", "3.11"]
        command += ["--platform", "manylinux_2_28_x86_64", "-d", folder, f"torch_npu=={release}"]
        subprocess.run(command, check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            present = [name for name in LIBRARIES if name in wheel.namelist()]
            return merged(schema_strings(wheel.read(name)) for name in present)


def record(schemas: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """Return the compact record.

    Args:
        schemas: Release -> operator -> schema.
    """
    names = sorted(schemas, key=Version)
    operators = sorted({name for of in schemas.values() for name in of if KEPT.match(name)})
    compact: dict[str, dict[str, tuple[str, ...]]] = {}
    for operator in operators:
        having: dict[str, set[str]] = {}
        for release in names:
            if (schema := schemas[release].get(operator)) is not None:
                having.setdefault(schema, set()).add(release)
        compact[operator] = {schema: as_ranges(names, in_) for schema, in_ in having.items()}
    return {"releases": names, "operators": compact}


@click.command()
@click.option("--from-cache", is_flag=True, help="Download nothing.")
def command(from_cache: bool) -> None:
    """Write the record of every release's schemas."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for release in () if from_cache else offered():
        target = CACHE / f"{release}.json"
        if not target.exists():
            target.write_text(json.dumps(schemas_of(release), indent=0), encoding="utf-8")
            click.echo(f"torch_npu {release}: read")
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in CACHE.glob("*.json")}
    RECORD.write_text(json.dumps(record(found), indent=1) + "\n", encoding="utf-8")
    click.echo(f"{RECORD}: {len(found)} releases")


if __name__ == "__main__":
    command()
