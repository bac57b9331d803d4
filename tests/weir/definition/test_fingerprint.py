"""What changes a pipeline's fingerprint, and what does not, across processes too."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from weir import delta
from weir.definition.fingerprint import fingerprint, fingerprint_of_stage
from weir.definition.fingerprint import fingerprint_of as digits_of

PROJECT = Path(__file__).parents[3]

HELPER = """
    RATE = 3

    class Price:
        def __init__(self, net): self.net = net
        def gross(self): return self.net * RATE

    def doubled(value): return value * 2
"""
FLOW = """
    import logging, threading
    import polars as pl
    import pyarrow as pa
    import helper
    from helper import Price, doubled
    from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage

    log, lock = logging.getLogger("x"), threading.Lock()
    KNOWN = {"b", "a", "c", ("d", 1)}

    class Seen(State):
        rows: int = 0

    def inner(rows):
        with lock:
            return rows.with_columns(v=doubled(pl.col("v")) + Price(1).gross() + len(KNOWN))

    @stage("s", source=files("{landing}/*.parquet", name="landing"), key="k", state=Seen, sink=delta.append("t"))
    def s(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        '''Docs.'''
        state.fold(rows, rows=agg.count())
        log.info("x")
        return inner(rows)

    pipeline = Pipeline("p", (s,), description="for people")
"""


def written(root: Path, flow: str, helper: str) -> None:
    root.mkdir(exist_ok=True)
    (root / "flow.py").write_text(textwrap.dedent(flow))
    (root / "helper.py").write_text(textwrap.dedent(helper))


@pytest.fixture
def fingerprint_of(tmp_path, monkeypatch):
    """The fingerprint of two modules, as they stand in these texts; or of the stage in them alone."""

    def fingerprint_of(flow: str = FLOW, helper: str = HELPER, *, of_stage: bool = False) -> str:
        written(tmp_path, flow, helper)
        for name in ("helper", "flow"):
            file = tmp_path / f"{name}.py"
            module = types.ModuleType(name)
            module.__file__ = str(file)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), module.__dict__)
        return fingerprint_of_stage(module.pipeline.stages[0]) if of_stage else fingerprint(module.pipeline)

    return fingerprint_of


def told_elsewhere(root: Path, seed: str) -> str:
    """The same, from a process of its own with other hashes of texts."""
    asked = "import flow; from weir.definition.fingerprint import fingerprint; print(fingerprint(flow.pipeline))"
    environment = {"PYTHONPATH": f"{root}:{PROJECT}", "PYTHONHASHSEED": seed, "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_processes_tell_the_same_of_the_same_code(tmp_path, fingerprint_of):
    first = fingerprint_of()
    assert told_elsewhere(tmp_path, "1") == first
    assert told_elsewhere(tmp_path, "2") == first, "from bytecode that the first has cached"


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("helper", "RATE = 3", "RATE = 4"),
        ("helper", "self.net * RATE", "self.net + RATE"),
        ("helper", "value * 2", "value + 2"),
        ("flow", "Price(1)", "Price(2)"),
        ("flow", '"c", ', '"e", '),
        ("flow", "rows: int = 0", "rows: int = 1"),
        ("flow", 'key="k"', 'key="v"'),
        ("flow", "rows: pl.DataFrame, state", "rows: pa.Table, state"),
        ("flow", 'delta.append("t")', 'delta.append("u")'),
    ],
)
def test_what_is_shipped_changes_it(fingerprint_of, file, before, after):
    sources = {"flow": FLOW, "helper": HELPER}
    assert before in sources[file]
    first = fingerprint_of(**sources)
    sources[file] = sources[file].replace(before, after)
    assert fingerprint_of(**sources) != first


def test_comments_and_moved_lines_do_not_where_all_can_be_looked_into(fingerprint_of):
    plain = FLOW.replace("with lock:", "if True:")
    moved = plain.replace("    def inner", "    # what was learned\n\n\n    def inner").replace(
        "for people", "for others"
    )
    assert fingerprint_of(moved) == fingerprint_of(plain)


@pytest.mark.parametrize("of_stage", [False, True])
def test_what_is_said_of_columns_and_fields_for_people_does_not(fingerprint_of, of_stage):
    plain = FLOW.replace("import logging, threading", "import logging\n    from typing import Annotated")
    plain = plain.replace('log, lock = logging.getLogger("x"), threading.Lock()', 'log = logging.getLogger("x")')
    plain = plain.replace("with lock:", "if True:")
    described = plain.replace("rows: int = 0", 'rows: Annotated[int, "So far."] = 0')
    described = described.replace('delta.append("t")', 'delta.append("t", describe={"v": "Twice."})')
    assert described != plain
    assert fingerprint_of(described, of_stage=of_stage) == fingerprint_of(plain, of_stage=of_stage)


def test_a_module_counts_whole_where_it_has_what_cannot_be_looked_into(fingerprint_of):
    assert fingerprint_of(FLOW.replace("threading.Lock()", "threading.RLock()")) != fingerprint_of()
    assert (
        fingerprint_of(
            FLOW.replace("    lock", "    # another one\n    lock").replace("def inner", "# here\n    def inner")
        )
        != fingerprint_of()
    )


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("Price(1)", "Price(2)", True),
        ("rows: int = 0", "rows: int = 1", True),
        ('key="k"', 'key="k", where="v > 1"', True),
        ("return inner(rows)", "return inner(rows)  # at last", False),
        ('Pipeline("p", (s,)', 'Pipeline("p", (s,), max_parallelism=4', False),
        ('delta.append("t")', 'delta.append("u")', False),
    ],
)
def test_a_stages_code_is_what_it_does(fingerprint_of, before, after, changes):
    plain = FLOW.replace("with lock:", "if True:")
    assert before in plain
    changed = fingerprint_of(plain.replace(before, after), of_stage=True)
    assert (changed != fingerprint_of(plain, of_stage=True)) == changes


def test_objects_that_nobody_can_look_into_fail_nothing(fingerprint_of):
    """A checkpoint has the fingerprint, so an epoch would fail."""
    odd = """
    class Link:
        def __init__(self, next): self.next = next

    chain = None
    for _ in range(5_000):
        chain = Link(chain)

    class Settings:
        def __getattr__(self, name): return {"rate": 1}[name]

    class Anything:
        def __getattr__(self, name): return Anything()

    settings, anything = Settings(), Anything()

    def inner(rows):
        assert chain is not None and settings.rate == 1 and anything.whatever
    """
    flow = FLOW.replace("    def inner(rows):\n", odd.lstrip("\n").rstrip(" "))
    assert "settings.rate" in flow
    first = fingerprint_of(flow, of_stage=True)
    assert fingerprint_of(flow, of_stage=True) == first
    assert fingerprint_of(flow.replace("5_000", "6_000"), of_stage=True) != first, "the whole module counts"


def test_sinks_whose_module_has_moved_are_the_same_code():
    """Checkpoints have these digits of a stage that writes to such a table."""
    digits = {
        delta.append("c", event_time="at", describe={"a": "b"}): "3d04a09ecd9351d9",
        delta.upsert("a", "id", order_by="at"): "a26f26dd3f3c2707",
        delta.replace("b", by="id"): "72bff457934c1a33",
        delta.replace("b", where="id>1"): "de054e671f982dea",
    }
    assert {sink: digits_of(sink) for sink in digits} == digits
