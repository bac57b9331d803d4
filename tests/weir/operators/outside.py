"""The operator of another package, installed for tests that use it by its entry point."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from weir.operators import kinds

MODULE = Path(__file__).with_name("third_party") / "weir_threshold.py"


def install(site: Path) -> None:
    """Install the package into a folder, as pip would, and let this process find it."""
    shutil.copy(MODULE, site)
    info = site / "weir_threshold-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weir-threshold\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weir.operators]\nthreshold = weir_threshold:Threshold\n")
    sys.path.insert(0, str(site))
    kinds.of_others.cache_clear()


def remove(site: Path) -> None:
    """Let this process find it no more."""
    sys.path.remove(str(site))
    sys.modules.pop("weir_threshold", None)
    kinds.of_others.cache_clear()
