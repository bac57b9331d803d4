"""The README's pipeline and its unit test are run as they stand there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_pipeline_passes_the_readmes_test(monkeypatch):
    code, test = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, "readme_example", module)
    exec(compile(code, "README.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "pipelines.visits", module)
    exec(compile(test, "README.md", "exec"), module.__dict__)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_the_example_is_about_thirty_lines():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]
    assert sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines()) <= 35


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README.read_text()):
        assert (README.parent / target).exists(), target
