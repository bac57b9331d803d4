"""The pipeline on docs/how-to/state.md and its test are run as they stand there."""

from __future__ import annotations

import re
import sys
import types
from datetime import timedelta

from weir import testing
from weir.settings.configuration import PROJECT

PAGE = PROJECT / "docs" / "how-to" / "state.md"


def test_the_page_runs(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    module = types.ModuleType("state_page")
    monkeypatch.setitem(sys.modules, "state_page", module)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
    rides = [{"rider": "ann", "at": module.NOON + timedelta(minutes=n), "city": "Oslo", "fare": 1.0} for n in range(20)]
    testing.assert_slicing_does_not_matter(module.riders, rides)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
