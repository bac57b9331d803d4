"""The figures of `python -m tests.tools.counts` that only go down: set a bound lower when the code is smaller."""

from __future__ import annotations

import pytest

from tests.tools.counts import PRODUCT, Size, importers, modules, size_of, sizes

LINES = {"product": 101_400, "benchmarks": 6_700}  # the next hundred; tests may grow


def test_the_code_does_not_grow():
    found = sizes()
    product = sum((found[name] for name in PRODUCT), Size())
    lines = {"product": product.lines, "benchmarks": found["benchmarks"].lines}
    assert {name: number for name, number in lines.items() if number > LINES[name]} == {}, (
        "take out what is needless; a commit that needs more raises the bound and says why"
    )


def test_few_modules_import_the_room_of_checkpoints():
    """What a checkpoint records lies in `state_ops.records`; who reads or writes the registry alone imports it."""
    found = importers("state_ops.checkpoints")
    assert "weir/ownership/pipeline_storage.py" in found
    assert len(found) <= 40, found


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("", Size(1)),
        ("x = 1  # a word\n\n\nif x:\n    y = 2\n", Size(1, 5, 3)),
        ('"""One.\n\nTwo.\n"""\n', Size(1, 4, 0, 4)),
        ('def f():\n    """One."""\n    return """no docstring"""\n', Size(1, 3, 2, 1)),
        ('class A:\n    x = 1\n    """Of x."""\n', Size(1, 3, 3)),
    ],
)
def test_a_size_counts_docstrings_apart(source, size):
    assert size_of(source) == size


def test_every_folder_counts_once():
    found, every = sizes(), sum((size_of(source) for _, source in modules("weir")), Size())
    assert found["weir"] == every
    assert found["weir/epoch"] == sum((size_of(source) for _, source in modules("weir/epoch")), Size())


@pytest.mark.parametrize(
    "line",
    [
        "from state_ops.checkpoints.registry import Registry",
        "from state_ops.checkpoints import retention",
        "from state_ops import checkpoints",
        "import state_ops.checkpoints.registry",
    ],
)
def test_every_form_of_an_import_is_found(line, tmp_path, monkeypatch):
    (tmp_path / "weir").mkdir()
    (tmp_path / "weir" / "a.py").write_text(f"def f():\n    {line}\n")
    (tmp_path / "weir" / "b.py").write_text("from state_ops.checkpoints_of import Registry\nimport state_ops\n")
    monkeypatch.setattr("tests.tools.counts.ROOT", tmp_path)
    assert importers("state_ops.checkpoints") == ["weir/a.py"]
