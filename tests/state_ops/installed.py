"""Backends of others, as installed distributions: the one that docs/how-to/state-backend.md shows, of which readers copy
what is tested, and one that keeps its snapshots.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.tools.distributions import describe
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
    offered = dict(re.findall(r'^(\w+) = "(.+)"$', project, re.MULTILINE))
    describe(site, "weir-sqlite", "weir.backends", offered)
    (site / "weir_sqlite.py").write_text(code)
    describe(site, "weir-vault", "weir.backends", {"vault": "weir_vault:FACTORY"})
    shutil.copy(VAULT, site)
    return site
