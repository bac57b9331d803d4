"""Backends of others, as installed distributions: the one that docs/how-to/state-backend.md shows, of which readers copy
what is tested, and one that keeps its snapshots.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from weir.settings.configuration import PROJECT

NAME = "sqlite"
VAULT = PROJECT / "tests" / "state_ops" / "backends" / "third_party" / "weir_vault.py"

_PAGE = PROJECT / "docs" / "how-to" / "state-backend.md"


def install(site: Path) -> Path:
    """Put them into `site`, as an installer would: modules, and metadata with their entry points. Returns `site`, for
    sys.path."""
    page = _PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    offered = re.findall(r'^(\w+ = )"(.+)"$', project, re.MULTILINE)
    _describe(site, "weir-sqlite", "".join(f"{name}{target}\n" for name, target in offered))
    (site / "weir_sqlite.py").write_text(code)
    _describe(site, "weir-vault", "vault = weir_vault:FACTORY\n")
    shutil.copy(VAULT, site)
    return site


def _describe(site: Path, name: str, points: str) -> None:
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[weir.backends]\n{points}")
