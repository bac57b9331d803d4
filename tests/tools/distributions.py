"""Distributions of others, as an installer would leave them in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def describe(site: Path, name: str, group: str, points: Mapping[str, str]) -> None:
    """Write the metadata of a distribution.

    Args:
        site: The folder, for `sys.path`. It may have other distributions.
        name: The name of the distribution, as `weir-sqlite`.
        group: The group of its entry points.
        points: By the name of an entry point, its object, as `weir_sqlite:FACTORY`.
    """
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    listed = "".join(f"{point} = {target}\n" for point, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{listed}")
