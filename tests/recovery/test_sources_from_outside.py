"""Sources that an installed package brings, each in one module and found by its entry point, work everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from state_ops.errors import PipelineError
from state_ops.records.checkpoint import PROMOTION
from tests.recovery.harness import Site
from tests.recovery.test_backfill import Plant, daily, devices
from tests.tools.distributions import describe
from tests.tools.stages import with_input
from weir import Pipeline, Source, debugging, source
from weir.dagster import metadata, specs
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, plan, promotion
from weir.ownership.backlog import observed
from weir.ownership.pipeline_storage import open_storage

MODULE = '''
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from weir import Batch, InputError, Lag, Part, Planned, Source, SourceCapabilities, files

SCHEMA = pa.schema([("device", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.int64())])


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSource(Source):
    """Lines of JSON that are appended to a file."""

    path: str

    def open(self, opening):
        return Journal(Path(opening.resolve(self.path)))


class Journal:
    def __init__(self, path):
        self._path = path

    def _lines(self):
        return self._path.read_text().splitlines()

    def begin(self, start):
        return {"line": start["line"] if isinstance(start, dict) else 0}

    def plan(self, position, limits, upto=None, hold=()):
        begin, lines = position["line"], self._lines()
        end = len(lines) if upto is None else upto["line"]
        to = min(end, begin + limits.rows)
        parts = [Part(str(begin), "journal", {"begin": begin, "end": to}, to - begin)] if to > begin else []
        return Planned(tuple(parts), {"line": to}, limited=to < end, ends={"journal": to >= len(lines)})

    def read(self, part):
        rows = [json.loads(line) for line in self._lines()[part.place["begin"] : part.place["end"]]]
        rows = [row | {"at": datetime.fromisoformat(row["at"])} for row in rows]
        yield Batch(pa.Table.from_pylist(rows, SCHEMA))

    def verify(self, parts):
        if any(part.place["end"] > len(self._lines()) for part in parts):
            raise InputError("Lines are gone.", where=str(self._path))

    def lag(self, position):
        return Lag(len(self._lines()) - position["line"])

    def where(self, part):
        return f"{self._path}, line {part.place['begin'] + 1}"

    def committed(self, position): ...

    def close(self): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerSource(Source):
    """Files in the folder of a partner."""

    partner: str

    @property
    def capabilities(self):
        there = files(f"{self.partner}/*.parquet")
        return SourceCapabilities(files=there, place=there.pattern)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as an installer would leave it."""
    site = tmp_path / "site-packages"
    describe(
        site,
        "weir-feeds",
        "weir.sources",
        {"journal": "weir_feeds:JournalSource", "partner": "weir_feeds:PartnerSource"},
    )
    (site / "weir_feeds.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "weir_feeds", raising=False)


def made(kind: str) -> Source:
    of_its_own = {"path": "{landing}/journal.jsonl"} if kind == "journal" else {"partner": "{landing}"}
    return source(kind, name="readings_in", event_time="at", **of_its_own)


def site_of(root: Path, read: Source) -> Site:
    """A site whose epochs are a day, which are 72 rows, or a file."""
    first = with_input(devices, read)
    code = Pipeline("sensors", (first, daily.reading({"devices": first})), max_parallelism=8)
    environment = {
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_EPOCH__MAX_ROWS": "72",
        "WEIR_CHECKPOINTS__NUM_RETAINED": "20",
        "WEIR_PIPELINES__SENSORS__BACKFILL": json.dumps({"start": "2026-01-01", "keep": 9}),
    }
    return Site(root, environment, code, __name__)


@pytest.fixture(params=["journal", "partner"])
def read(request: pytest.FixtureRequest, installed: None) -> Source:
    return made(request.param)


@pytest.fixture
def plant(read: Source, tmp_path: Path) -> Plant:
    return Plant(site_of(tmp_path / "site", read))


@pytest.fixture
def land(plant: Plant) -> Callable[..., None]:
    """Lets days arrive, or arrive corrected: as files, and as the lines of the journal."""

    def landed(*days: int, value: int = 1) -> None:
        plant.land(*days, value=value)
        rows = pl.concat([pl.read_parquet(file) for file in sorted(plant.site.landing.glob("*.parquet"))])
        lines = [json.dumps(row | {"at": row["at"].isoformat()}) for row in rows.to_dicts()]
        (plant.site.landing / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines))

    return landed


def test_its_rows_count_once_and_a_plan_finds_nothing_wrong(plant, land):
    code, settings = plant.site.pipeline, plant.site.settings
    land(1, 2)
    assert not plan.plan(code, settings).stops
    assert len(plant.run()) == 2
    land(3)
    assert not plan.plan(code, settings).stops
    assert len(plant.run()) == 1
    plant.assert_exact()


def test_an_epoch_is_played_again_and_a_row_is_explained(plant, land):
    code, settings = plant.site.pipeline, plant.site.settings
    land(1, 2)
    plant.run()
    played = debugging.debug(code, 2, stage="devices", key="d1", settings=settings)
    assert played.differences == () and [rows.height for rows in played.inputs.values()] == [24]
    seen = debugging.explain(code, "readings", "device = 'd1' AND value = 2", settings=settings)
    assert (seen.origin.epoch, seen.played.is_same) == (2, True)
    assert sum(of.rows.height for of in seen.trace.contributions) == 48, "all that made its key's state"


def test_a_branch_reads_what_its_pipeline_has_read_and_is_promoted(plant, land):
    code, settings = plant.site.pipeline, plant.site.settings
    land(1, 2, 3)
    plant.run()
    forks.fork(code, settings, "fix", 1)
    land(4)
    branch = Plant(replace(plant.site, pipeline=forks.branched(code, settings, "fix")))
    assert len(branch.run()) == 2
    assert promotion.plan(code, settings, "fix").obstacles == ()
    promotion.promote(code, settings, "fix", executor=InMemoryExecutor())
    assert len(plant.run()) == 1
    plant.assert_exact()


def test_corrected_days_are_replayed(plant, land):
    land(1, 2, 3, 4)
    plant.run()
    land(2, 3, value=100)
    done = plant.backfill(2, 3, promote=True)
    assert (done.base, done.epochs, done.promoted.kind) == (1, 3, PROMOTION)
    plant.assert_exact()


def test_dagster_shows_where_it_is_and_how_far_it_is_read(plant, read, land):
    code, settings = plant.site.pipeline, plant.site.settings
    land(1, 2)
    plant.run()
    land(3)
    (spec,) = specs.sources(code, settings)
    _, registry = open_storage(code, settings)
    shown = observed(code, settings, registry.head())["readings_in"]
    if read.capabilities.files is not None:
        place = f"{plant.site.landing}/*.parquet"
        assert spec.kinds == {"file", "parquet"} and spec.metadata["dagster/uri"] == place
        assert spec.metadata["files"] == dg.MetadataValue.path(place)
        assert (shown["files waiting"], shown["files read"]) == (1, 2)
    else:
        assert spec.kinds == {"journal"} and spec.metadata["dagster/uri"] == "journal"
        assert (shown["rows waiting"], shown["rows read"]) == (72, 144)
    assert metadata.of_source(read, "there")["event time"] == "at"


def test_a_position_of_another_kind_of_source_is_refused(plant, read, land):
    land(1)
    plant.run()
    was, now = ("file", "journal") if read.capabilities.files is not None else ("journal", "file")
    other = site_of(plant.site.root, made("journal" if now == "journal" else "partner"))
    with pytest.raises(PipelineError, match=f"was a {was} source when it was read, and is a {now} source now"):
        Plant(other).run()
