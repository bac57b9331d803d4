"""The backend that docs/reference/backends.md shows, as an installed distribution: what its readers copy is what is
tested."""

from __future__ import annotations

import re
from pathlib import Path

from weir.settings.configuration import PROJECT

NAME = "sqlite"

_PAGE = PROJECT / "docs" / "reference" / "backends.md"


def install(site: Path) -> Path:
    """Put it into `site`, as an installer would: a module, and metadata with its entry point. Returns `site`, for
    sys.path."""
    page = _PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    offered = re.findall(r'^(\w+ = )"(.+)"$', project, re.MULTILINE)
    metadata = site / "weir_sqlite-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "weir_sqlite.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weir-sqlite\nVersion: 1.0\n")
    points = "".join(f"{name}{target}\n" for name, target in offered)
    (metadata / "entry_points.txt").write_text(f"[weir.backends]\n{points}")
    return site
