"""Generated pages are current, and what the docs say of the registry's columns is what the tables have."""

from __future__ import annotations

import re

from configs import reference
from configs.settings import PROJECT
from state_ops.checkpoints.registry import CHECKPOINTS, PINS, PUBLICATIONS, STATE_FILES


def test_the_configuration_page_is_current():
    assert reference.PAGE.read_text() == reference.page(), "run `python -m configs.reference`"


def test_every_registry_column_is_documented():
    page = (PROJECT / "docs" / "reference" / "storage.md").read_text()
    tables = {"checkpoints": CHECKPOINTS, "state_files": STATE_FILES, "publications": PUBLICATIONS, "pins": PINS}
    for title, schema in tables.items():
        section = page.split(f"## registry/{title}")[1].split("\n## ")[0]
        words = set(re.findall(r"\w+", section))
        assert set(schema.names) <= words, (title, set(schema.names) - words)
