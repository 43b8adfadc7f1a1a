"""Installed packages with a plugin each, as an installer leaves them in site-packages."""

from __future__ import annotations

from pathlib import Path


def write_packages(folder: Path, count: int) -> None:
    """Write distributions to a folder for ``sys.path``; each has a static manifest.

    Importing one of their plugins is an error.
    """
    for number in range(count):
        name, package = f"plugin-{number}", f"ascend_run_plugin_{number}"
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise AssertionError('imported')\n")
        (folder / package / "manifest.toml").write_text(
            f'[{name}]\nsummary = "the plugin of package {number}"\nrequires_api = ">=0"\n'
        )
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: ascend-run-{name}\nVersion: 1.0\n"
            f"Summary: a package\nRequires-Dist: ascend-run\n\n# A package\n"
        )
        (info / "entry_points.txt").write_text(
            f"[ascend_run.manifests]\n{name} = {package}:manifest.toml\n\n"
            f"[ascend_run.plugins]\n{name} = {package}:Plugin\n"
        )
