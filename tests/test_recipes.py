"""Each page of docs/recipes does what it shows: its pipeline makes the rows out of the rows in, as DuckDB does."""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.recovery.conftest import Ended
from tests.recovery.conftest import weir as weir
from tests.recovery.harness import Site
from tests.recovery.test_forget import raw
from weir import testing
from weir.execution.in_process import InMemoryExecutor
from weir.operations import state_import
from weir.ownership import ownership
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT

FOLDER = PROJECT / "docs" / "recipes"
PAGES = sorted(FOLDER.glob("[a-z]*.md"))
OPERATIONS = [
    FOLDER / f"{name}.md" for name in ("backfill-a-month", "gdpr-deletion", "migrate-from-spark-structured-streaming")
]
KINDS = "Rows in|Rows corrected|Rows of the table|Rows of the old state|Rows out"
TABLE = re.compile(rf"^({KINDS}), `(\w+)`[^\n]*:\n\n((?:\|.*\n)+)", re.MULTILINE)
CODE = re.compile(r"^```python\n# (\w+)/(\w+)\.py\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
EPOCH = "epoch"  # a column of pages: which epoch brings a row, or hands it out
ARRIVES = "arrives"  # instead of it: the processing time of the epoch

# The same rows out by DuckDB, over views with the rows in, and with the tables that are looked up: by page and table.
ASKED = {
    "alert-when-nothing-comes": {
        "silent": """
            SELECT arrives + INTERVAL 15 MINUTE AS arrives, device, arrives AS heard_at, arrives + INTERVAL 15 MINUTE AS silent_at
            FROM (SELECT *, lead(arrives) OVER (PARTITION BY device ORDER BY arrives) AS next FROM readings)
            WHERE device IS NOT NULL AND (next IS NULL OR next > arrives + INTERVAL 15 MINUTE)
        """,
    },
    "backfill-a-month": {
        "monthly": """
            SELECT shop, date_trunc('month', "at") AS window_start, window_start + INTERVAL 1 MONTH AS window_end,
                sum(amount) AS amount
            FROM (FROM sales WHERE epoch NOT IN (SELECT epoch FROM sales_corrected) UNION ALL FROM sales_corrected)
            GROUP BY shop, window_start HAVING window_end <= (SELECT max("at") FROM sales)
        """,
    },
    "deduplicate-for-a-week": {
        "unique": """
            SELECT * FROM events QUALIFY row_number() OVER (PARTITION BY id ORDER BY epoch, "at") = 1
            OR "at" >= min("at") OVER (PARTITION BY id) + INTERVAL 7 DAY
        """,
        "unique_late": """
            SELECT * FROM events WHERE "at" + INTERVAL 7 DAY <= (SELECT max("at") FROM events AS e WHERE e.epoch < events.epoch)
        """,
    },
    "enrich-from-a-changing-table": {
        "placed": "SELECT * FROM orders LEFT JOIN customers ON customer = name AND orders.epoch = customers.epoch",
    },
    "funnel": {
        "funnel": """
            SELECT min(looks."at")::DATE AS day, of.step, count(DISTINCT user) AS users, max(of.epoch) AS epoch
            FROM events AS of JOIN events AS looks USING (user)
            WHERE looks.step = 'look' AND of."at" BETWEEN looks."at" AND looks."at" + INTERVAL 1 DAY AND (
                of.step <> 'buy' OR EXISTS (FROM events AS c WHERE c.user = of.user AND c.step = 'cart' AND c."at" < of."at")
            )
            GROUP BY of.step
        """,
    },
    "gdpr-deletion": {
        "spending": """
            SELECT customer, sum(amount) AS total, max(epoch) + 1 AS epoch FROM purchases
            WHERE customer <> 'ada@example.org' GROUP BY customer
        """,
    },
    "join-with-a-time-limit": {
        "paid": """
            SELECT greatest(o.epoch, p.epoch) AS epoch, id, amount, "at", paid_at FROM orders AS o JOIN payments AS p
            ON id = "order" AND paid_at BETWEEN "at" AND "at" + INTERVAL 1 HOUR
            UNION ALL
            SELECT 2, id, amount, "at", NULL FROM orders WHERE NOT EXISTS (
                FROM payments WHERE id = "order" AND paid_at BETWEEN "at" AND "at" + INTERVAL 1 HOUR
            ) AND "at" + INTERVAL 65 MINUTE < (SELECT max(paid_at) FROM payments)
        """,
    },
    "latest-row-per-key": {
        "orders": "SELECT * FROM orders QUALIFY row_number() OVER (PARTITION BY id ORDER BY updated DESC) = 1",
    },
    "migrate-from-spark-structured-streaming": {
        "totals": """
            SELECT user, sum(clicks) AS clicks, sum(seconds) AS seconds, 2 AS epoch
            FROM (FROM clicks_by_user UNION ALL SELECT user, 1, seconds FROM clicks)
            WHERE user IN (SELECT user FROM clicks) GROUP BY user
        """,
    },
    "sessions-with-late-data": {
        "visits": """
            SELECT 2 AS epoch, user, min("at") AS window_start, max("at") + INTERVAL 30 MINUTE AS window_end,
                count(*) AS pages, arg_min(page, "at") AS entry
            FROM (
                SELECT *, sum(begins::INT) OVER (PARTITION BY user ORDER BY "at") AS nth FROM (
                    SELECT *, coalesce("at" - lag("at") OVER (PARTITION BY user ORDER BY "at") >= INTERVAL 30 MINUTE, TRUE) AS begins
                    FROM clicks WHERE epoch < 3
                )
            )
            GROUP BY user, nth HAVING window_end <= (SELECT max("at") - INTERVAL 15 MINUTE FROM clicks)
        """,
        "visits_late": "SELECT * FROM clicks WHERE epoch = 3",
    },
    "slowly-changing-dimension": {
        "customers": """
            SELECT customer, city, "at" AS valid_from, lead("at") OVER (PARTITION BY customer ORDER BY "at") AS valid_to
            FROM (
                SELECT *, lag(city) OVER (PARTITION BY customer ORDER BY "at") AS was FROM changes WHERE epoch < 3
            )
            WHERE city IS DISTINCT FROM was
        """,
        "outdated": """
            SELECT * FROM changes WHERE "at" < (SELECT max("at") FROM changes AS c WHERE c.epoch < changes.epoch)
        """,
    },
    "top-n-of-a-month": {
        "best": """
            SELECT 2 AS epoch, page, begins AT TIME ZONE 'Europe/Berlin' AS window_start,
                (begins + INTERVAL 1 MONTH) AT TIME ZONE 'Europe/Berlin' AS window_end, count(*) AS views,
                row_number() OVER (PARTITION BY begins ORDER BY count(*) DESC, page) AS rank_number
            FROM (SELECT page, date_trunc('month', "at" AT TIME ZONE 'Europe/Berlin') AS begins FROM views)
            GROUP BY page, begins HAVING window_end < (SELECT max("at") FROM views) QUALIFY rank_number <= 2
        """,
    },
}


@dataclass(frozen=True)
class Shown:
    """A table of a page. kind: what it says in front of it; rows: typed by what their cells look like."""

    kind: str
    name: str
    columns: list[str]
    rows: list[dict[str, Any]]

    def frame(self, epoch: int | None = None) -> pl.DataFrame:
        """Its rows, all of them or those of an epoch, with the types that all of its rows give."""
        frame = pl.DataFrame(self.rows, infer_schema_length=None)
        return frame if epoch is None else frame.filter(pl.col(EPOCH) == epoch).drop(EPOCH)


@dataclass(frozen=True)
class Recipe:
    """A page. modules: its Python, by file; imported under the names that it has on the page. commands: those of weir."""

    tables: list[Shown]
    modules: dict[str, types.ModuleType]
    commands: list[list[str]]

    def of(self, kind: str) -> dict[str, Shown]:
        return {table.name: table for table in self.tables if table.kind == kind}

    @property
    def module(self) -> types.ModuleType:
        (module,) = (of for name, of in self.modules.items() if name.startswith("pipelines."))
        return module


def value(cell: str) -> Any:
    """A cell's value by its looks."""
    for pattern, kind in (
        (r"", lambda _: None),
        (r"-?\d+", int),
        (r"-?\d+\.\d+", float),
        (r"\d{4}-\d\d-\d\d", date.fromisoformat),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d", lambda text: datetime.fromisoformat(text).replace(tzinfo=UTC)),
    ):
        if re.fullmatch(pattern, cell):
            return kind(cell)
    return cell


def shown(text: str) -> list[Shown]:
    tables = []
    for kind, name, lines in TABLE.findall(text):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        tables.append(Shown(kind, name, head, [dict(zip(head, map(value, row), strict=True)) for row in rows]))
    return tables


def recipe(page: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    text, modules = page.read_text(), {}
    for folder, name, code in CODE.findall(text):
        if folder not in ("pipelines", "tests"):
            continue
        modules[f"{folder}.{name}"] = module = types.ModuleType(f"{folder}.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, page.name, "exec"), module.__dict__)
    commands = [shlex.split(line)[1:] for block in COMMANDS.findall(text) for line in block.splitlines()]
    return Recipe(shown(text), modules, commands)


def as_set(frame: pl.DataFrame, columns: list[str]) -> Counter[tuple]:
    """Rows without order; of moments the moment."""
    moments = [name for name, kind in frame.schema.items() if isinstance(kind, pl.Datetime)]
    frame = frame.with_columns(pl.col(name).dt.cast_time_unit("us").dt.epoch("us") for name in moments)
    return Counter(frame.select(columns).rows())


def land(folder: Path, name: str, rows: pl.DataFrame) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows.write_parquet(folder / f".{name}")
    (folder / f".{name}").rename(folder / f"{name}.parquet")


def site_of(page: Recipe, root: Path) -> Site:
    """Its pipeline with real storage, whose lookups find their tables in a warehouse of its own."""
    pipeline = page.module.pipeline
    params = {"landing": str(root / "landing"), "warehouse": str(root / "warehouse")}
    options = {f"WEIR_PIPELINES__{pipeline.name.upper()}__PARAMS": json.dumps(params)}
    return Site(root, options, pipeline, page.module.__name__)


def epochs_of(page: Recipe) -> list[int]:
    given = [*page.of("Rows in").values(), *page.of("Rows of the table").values()]
    return sorted({row[EPOCH] for table in given for row in table.rows})


def land_epoch(page: Recipe, site: Site, epoch: int, kind: str = "Rows in") -> None:
    for name, table in page.of("Rows of the table").items():
        if len(rows := table.frame(epoch)):
            write_deltalake(str(site.root / "warehouse" / name), rows.to_arrow(), mode="overwrite")
    for name, table in page.of(kind).items():
        if len(rows := table.frame(epoch)):
            land(site.landing / name, str(epoch), rows)


def go(site: Site) -> None:
    """Run one epoch."""
    reports = list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert len(reports) == 1


def rows_by_epoch(page: Recipe, site: Site) -> Iterator[tuple[int, dict[str, pl.DataFrame]]]:
    """Run the page's rows in, an epoch each; yields what all tables have then."""
    for epoch in epochs_of(page):
        land_epoch(page, site, epoch)
        go(site)
        yield epoch, {name: stored(site, name) for name in page.of("Rows out")}


def stored(site: Site, name: str) -> pl.DataFrame:
    table = DeltaTable(str(site.storage / "tables" / name))
    return pl.DataFrame(table.to_pyarrow_table())


def assert_made(page: Recipe, site: Site) -> None:
    """All rows out come, with all their columns, in the epochs that the page says."""
    before: dict[str, Counter] = {}
    came: dict[str, list[tuple[int, tuple]]] = {name: [] for name in page.of("Rows out")}
    tables: dict[str, pl.DataFrame] = {}
    for epoch, tables in rows_by_epoch(page, site):
        for name, frame in tables.items():
            columns = [column for column in page.of("Rows out")[name].columns if column in frame.columns]
            rows = as_set(frame, columns) if len(frame) else Counter()
            came[name] += [(epoch, row) for row in (rows - before.get(name, Counter())).elements()]
            before[name] = rows
    for name, out in page.of("Rows out").items():
        frame = tables[name]
        assert {*frame.columns, EPOCH} == {*out.columns, EPOCH}, name
        columns = [column for column in out.columns if column in frame.columns]
        assert as_set(frame, columns) == as_set(out.frame(), columns), name
        if EPOCH in out.columns and EPOCH not in frame.columns:
            told = as_set(out.frame(), [EPOCH, *columns])
            assert Counter((epoch, *row) for epoch, row in came[name]) == told, name


def assert_made_by_the_clock(page: Recipe) -> None:
    """The same of rows whose processing time the page says. A row without a device is an epoch without rows."""
    (given,) = page.of("Rows in").values()
    ran, came = testing.run_pipeline(page.module.pipeline), {name: Counter[tuple]() for name in page.of("Rows out")}
    for moment in dict.fromkeys(row[ARRIVES] for row in given.rows):
        rows = [
            {name: of for name, of in row.items() if name != ARRIVES} for row in given.rows if row[ARRIVES] == moment
        ]
        made = ran.epoch([row for row in rows if any(of is not None for of in row.values())], now=moment)
        for name, out in page.of("Rows out").items():
            assert {*made[name].columns, ARRIVES} == {*out.columns}, name
            came[name] += as_set(made[name].with_columns(pl.lit(moment).alias(ARRIVES)), out.columns)
    for name, out in page.of("Rows out").items():
        assert came[name] == as_set(out.frame(), out.columns), name


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OPERATIONS], ids=lambda page: page.stem)
def test_a_pipeline_makes_the_rows_of_its_page(page, tmp_path, monkeypatch):
    read = recipe(page, monkeypatch)
    if any(ARRIVES in table.columns for table in read.tables):
        assert_made_by_the_clock(read)
    else:
        assert_made(read, site_of(read, tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_test_of_a_page_passes(page, monkeypatch):
    read = recipe(page, monkeypatch)
    tests = [of for module in read.modules.values() for name, of in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


@pytest.fixture
def here(monkeypatch) -> None:
    """Commands run without Spark."""
    for module in (ownership, state_import):
        monkeypatch.setattr(module, "SparkExecutor", lambda *_, **__: InMemoryExecutor())


def assert_out(page: Recipe, site: Site) -> None:
    for name, out in page.of("Rows out").items():
        frame = stored(site, name)
        assert {*frame.columns} == {*out.columns}, name
        assert as_set(frame, out.columns) == as_set(out.frame(), out.columns), name


def assert_done(weir: Callable[..., Ended], page: Recipe, site: Site) -> None:
    for command in page.commands:
        done = weir(site, *command)
        assert done.code == 0, (command, done.err)


def test_a_corrected_month_takes_the_place_of_the_old_one(tmp_path, monkeypatch, here, weir):
    page = recipe(FOLDER / "backfill-a-month.md", monkeypatch)
    site = site_of(page, tmp_path)
    block = re.search(r"`backfill: \{start: ([\d-]+), keep: (\d+)\}`", (FOLDER / "backfill-a-month.md").read_text())
    assert block is not None
    variable = f"WEIR_PIPELINES__{site.pipeline.name.upper()}__BACKFILL"
    site.options[variable] = json.dumps({"start": block[1], "keep": int(block[2])})
    for _ in rows_by_epoch(page, site):
        pass
    assert 7 in stored(site, "monthly")["amount"].to_list()
    land_epoch(page, site, 2, "Rows corrected")
    assert_done(weir, page, site)
    assert_out(page, site)


def test_a_customer_is_forgotten(tmp_path, monkeypatch, here, weir):
    page = recipe(FOLDER / "gdpr-deletion.md", monkeypatch)
    site = site_of(page, tmp_path)
    land_epoch(page, site, 1)
    go(site)
    assert has_key(site)
    assert_done(weir, page, site)
    (code,) = (code for folder, _, code in CODE.findall((FOLDER / "gdpr-deletion.md").read_text()) if folder == "gdpr")
    exec(code.replace(".weir/storage/spending", str(site.storage)), {})
    assert has_key(site) == []
    assert weir(site, "resume", "spending").code == 0
    land_epoch(page, site, 2)
    go(site)
    assert_out(page, site)
    assert weir(site, "fsck", "spending").code == 0


def has_key(site: Site) -> list[str]:
    """The files of state, registry and tables that have the key of the page, but for what the page says has it still."""
    return [
        name for name in raw(site.storage, "ada@example.org") if not re.match(r"tables/\w+/_delta_log/|outputs/", name)
    ]


def test_the_state_of_spark_is_gone_on_with(tmp_path, monkeypatch, here, weir):
    page = recipe(FOLDER / "migrate-from-spark-structured-streaming.md", monkeypatch)
    site = site_of(page, tmp_path)
    (old,) = page.of("Rows of the old state").values()
    old.frame().write_parquet(tmp_path / "old_state.parquet")
    land_epoch(page, site, 1)
    monkeypatch.chdir(tmp_path)
    assert_done(weir, page, site)
    assert_out(page, site)


@pytest.mark.parametrize("page", [page.stem for page in PAGES])
def test_duckdb_makes_the_rows_of_a_page_too(page, monkeypatch):
    read = recipe(FOLDER / f"{page}.md", monkeypatch)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for table in read.tables:
            if table.kind != "Rows out":
                connection.register(table.name + "_corrected" * (table.kind == "Rows corrected"), table.frame())
        for name, out in read.of("Rows out").items():
            assert as_set(connection.sql(ASKED[page][name]).pl(), out.columns) == as_set(out.frame(), out.columns), name


def test_pages_are_short_and_of_one_form():
    for page in PAGES:
        lines = page.read_text().splitlines()
        assert 20 <= sum(map(bool, lines)) <= 60, page.name
        assert all(len(line) <= 120 or line.startswith("|") for line in lines), page.name
        title, empty, sentence, *rest = lines
        assert title.startswith("# ") and not empty and sentence.endswith("."), page.name
        headings = [line for line in rest if line.startswith("#") and line.startswith("## ")]
        assert headings == ["## What to know", "## Its test"], page.name
        assert sum(line.startswith("- ") for line in lines) <= 5, page.name


def test_the_index_lists_every_page_once():
    index = (FOLDER / "README.md").read_text()
    assert Counter(re.findall(r"\(([\w-]+\.md)\)", index)) == Counter(page.name for page in PAGES)
    for page in (FOLDER / "README.md", *PAGES):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), target
