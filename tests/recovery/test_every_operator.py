"""Every operator of several inputs, of changes, of ranks, of sketches or without state, where pipelines are forked,
promoted, backfilled, rewound, held by a gate and shown by Dagster: its tables are what DuckDB says of the input."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from polars.testing import assert_frame_equal

from state_ops.errors import GateError, WeirError
from state_ops.records.checkpoint import Checkpoint
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.weir.operators.outside import installed as installed
from weir import (
    Epoch,
    Pipeline,
    Sink,
    Stage,
    agg,
    aggregate,
    as_of,
    delta,
    desc,
    expect,
    files,
    join,
    lookup,
    operator,
    select,
    stage,
    top_n,
    union,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.operations import branch_diff, forks, promotion
from weir.operations.backfill import Backfilled, backfill
from weir.ownership.pipeline_storage import open_storage
from weir.restore import rewind as rewinding
from weir.run import maintenance
from weir.run.run import RunOptions, run

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
COLUMNS = pa.schema([("seq", pa.int64()), ("k", pa.int64()), ("at", TIME), ("v", pa.int64()), ("u", pa.string())])
SOURCES = ("a", "b")
A, B = (files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at") for name in SOURCES)
QUIET = files("{landing}/b/*.parquet", name="b", event_time="at", idle_after="1ms")
GATE = expect("ExpectColumnValuesToBeBetween", column="v", max_value=9_999)
BAD = 100_000
HERE, OUT = InMemoryExecutor(), delta.append("out")


def day(number: int) -> datetime:
    return FIRST + timedelta(days=number - 1)


@dataclass(frozen=True)
class Kind:
    """An operator.

    Attributes:
        make: The stages of a pipeline of it; given the sink and the gate of the last of them.
        sql: What its table has once all input is read and windows and rows that wait are drained, from the tables a, b
            and t.
        key: The columns of which the newest row counts, of a table with more.
        close: Of these columns values are estimates, off by one at most.
        day: The column that says to which day a row belongs; None: its rows do not.
        new: The columns that its function makes of nothing that Weir knows.
        is_quiet: Of the second source there is the first day alone.
    """

    make: Callable[[dict[str, Any]], tuple[Stage, ...]]
    sql: str
    sink: Sink = OUT
    key: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    day: str | None = "at"
    new: frozenset[str] = frozenset()
    is_quiet: bool = False


def stateless(out: dict[str, Any]) -> tuple[Stage, ...]:
    @stage("out", source=A, key=None, **out)
    def made(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
        """Rows with one more column."""
        return rows.with_columns(twice=pl.col("v") * 2)

    return (made,)


def several(out: dict[str, Any]) -> tuple[Stage, ...]:
    outputs = {"odd": out["sink"], "few": None}

    @stage("out", source=A, key=None, outputs=outputs, **{**out, "sink": delta.append("main")})
    def made(rows: pl.DataFrame, epoch: Epoch) -> dict[str, pl.DataFrame]:
        """Rows, and some of them elsewhere."""
        return {"main": rows, "odd": rows.filter(pl.col("v") % 2 == 1), "few": rows.select("seq", "v")}

    return made, aggregate("few", made.output("few"), key="v", n=agg.count(), sink=delta.append("few"))


def joined(how: str, **more: Any) -> Callable[[dict[str, Any]], tuple[Stage, ...]]:
    within = more or {"within": ("-2h", "5h"), "lateness": "30h"}
    return lambda out: (join("out", A, B, on="k", how=how, **within, **out),)


ON = "a.k = b.k AND b.at BETWEEN a.at - INTERVAL 2 HOUR AND a.at + INTERVAL 5 HOUR"
LEFT = "a.k, a.seq, a.at, a.v, a.u"
BOTH = "coalesce(a.k, b.k) AS k, a.seq, a.at, a.v, a.u, b.seq AS seq_right, b.at AS at_right, b.v AS v_right, b.u AS u_right"
KINDS = {
    "stateless": Kind(stateless, "SELECT *, v * 2 AS twice FROM a", new=frozenset({"twice"})),
    "select": Kind(
        lambda out: (select("out", A, "seq", "k", "at", "v", "v + 1 AS more", where="v <> 3", **out),),
        "SELECT seq, k, a.at, v, v + 1 AS more FROM a WHERE v <> 3",
    ),
    "union": Kind(lambda out: (union("out", A, B, **out),), "FROM a UNION ALL FROM b"),
    **{
        how: Kind(
            joined(how),
            f"SELECT {BOTH} FROM a {how} JOIN b ON {ON}",
            day={"full": None, "right": "at_right"}.get(how, "at"),
        )
        for how in ("inner", "left", "right", "full")
    },
    **{how: Kind(joined(how), f"SELECT {LEFT} FROM a {how} JOIN b ON {ON}") for how in ("semi", "anti")},
    "ttl": Kind(joined("inner", ttl=None), f"SELECT {BOTH} FROM a JOIN b ON a.k = b.k"),
    "semi_ttl": Kind(joined("semi", ttl="1d"), f"SELECT {LEFT} FROM a SEMI JOIN b ON a.k = b.k"),
    "as_of": Kind(
        lambda out: (as_of("out", A, B, on="k", lateness="30h", **out),),
        f"SELECT {BOTH} FROM a ASOF LEFT JOIN b ON a.k = b.k AND a.at >= b.at",
    ),
    "lookup": Kind(
        lambda out: (lookup("out", A, table="{warehouse}/t", on="k", columns=["name"], **out),),
        "SELECT a.*, t.name FROM a LEFT JOIN t USING (k)",
    ),
    "top_n": Kind(
        lambda out: (top_n("out", A, key="k", by=[desc("v"), "seq"], n=3, **out),),
        "SELECT *, row_number() OVER (PARTITION BY k ORDER BY v DESC, seq) AS rank_number FROM a QUALIFY rank_number < 4",
        sink=delta.upsert("out", key=["k", "rank_number"]),
        day=None,
    ),
    "final_ranks": Kind(
        lambda out: (
            sums := window("sums", A, key="k", on="at", every="6h", lateness="30h", v=agg.sum("v")),
            top_n("out", sums, key="window_start", by=[desc("v"), "k"], n=2, until="window_end", **out),
        ),
        """SELECT *, row_number() OVER (PARTITION BY window_start ORDER BY v DESC, k) AS rank_number FROM (
           SELECT k, time_bucket(INTERVAL 6 HOUR, a.at) AS window_start, window_start + INTERVAL 6 HOUR AS window_end,
           sum(v)::BIGINT AS v FROM a GROUP BY ALL) QUALIFY rank_number <= 2""",
        day="window_start",
    ),
    "changes": Kind(
        lambda out: (
            by_k := aggregate("by_k", A, key="k", v=agg.sum("v"), n=agg.count(), changes=True),
            aggregate("out", by_k, key="n", v=agg.sum("v"), changes=True, **out),
        ),
        "SELECT n, sum(v)::BIGINT AS v FROM (SELECT k, sum(v) AS v, count(*) AS n FROM a GROUP BY k) GROUP BY n",
        sink=delta.upsert("out", key="n"),
        day=None,
    ),
    "aggregates": Kind(
        lambda out: (
            aggregate(
                "out",
                A,
                key="k",
                v=agg.max("v"),
                few=agg.count(where="v < 5"),
                different=agg.count_distinct("u"),
                about=agg.approx_distinct("seq"),
                middle=agg.approx_quantile("v", 0.25),
                **out,
            ),
        ),
        """SELECT k, max(v) AS v, count(*) FILTER (WHERE v < 5) AS few, count(DISTINCT u) AS different,
           count(DISTINCT seq) AS about, quantile_cont(v, 0.25)::DOUBLE AS middle FROM a GROUP BY k""",
        key=("k",),
        close=("about", "middle"),
        day=None,
    ),
    "windowed": Kind(
        lambda out: (
            window(
                "out",
                A,
                key="k",
                on="at",
                every="6h",
                lateness="30h",
                v=agg.max("v"),
                few=agg.count(where="v < 5"),
                different=agg.count_distinct("u"),
                about=agg.approx_distinct("seq"),
                **out,
            ),
        ),
        """SELECT k, time_bucket(INTERVAL 6 HOUR, a.at) AS window_start, window_start + INTERVAL 6 HOUR AS window_end,
           max(v) AS v, count(*) FILTER (WHERE v < 5) AS few, count(DISTINCT u) AS different,
           count(DISTINCT seq) AS about FROM a GROUP BY ALL""",
        close=("about",),
        day="window_start",
    ),
    "by_clock": Kind(
        lambda out: (
            closed := window("closed", A, key="k", on=None, every="1s", v=agg.max("v"), n=agg.count()),
            aggregate("out", closed, key="k", v=agg.max("v"), n=agg.sum("n"), **out),
        ),
        "SELECT k, max(v) AS v, count(*) AS n FROM a GROUP BY k",
        key=("k",),
        day=None,
    ),
    "of_others": Kind(
        lambda out: (operator("threshold", "out", A, key="k", order_by=["at", "seq"], column="v", limit=10, **out),),
        "FROM a WHERE v >= 10 QUALIFY row_number() OVER (PARTITION BY k ORDER BY seq // 1000, a.at, seq) = 1",
    ),
    "outputs": Kind(several, "SELECT * FROM a WHERE v % 2 = 1", day=None),
    "idle": Kind(
        lambda out: (join("out", A, QUIET, on="k", how="left", within=("-2h", "5h"), lateness="30h", **out),),
        f"SELECT {BOTH} FROM a LEFT JOIN b ON {ON}",
        is_quiet=True,
    ),
}


def pipeline_of(kind: Kind, gate: bool = True) -> Pipeline:
    given = kind.make({"sink": kind.sink, **({"gate": GATE} if gate else {})})
    return Pipeline("every", given, max_parallelism=6)


def rows_of(number: int, source: str, more: int = 0) -> pa.Table:
    """A day's rows; those of its last hours come a day late."""
    chance = random.Random(f"{number} {source}")
    times = [day(number) + timedelta(hours=chance.uniform(-6, 24)) for _ in range(40)]
    rows = [
        {"seq": 1000 * number + place, "k": chance.randrange(9), "at": at, "v": chance.randrange(12) + more,
         "u": chance.choice("abcdefg")}
        for place, at in enumerate(times)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, COLUMNS)


@dataclass
class House:
    """A site whose every day is a file of each source, and an epoch."""

    site: Site
    kind: Kind

    @classmethod
    def at(cls, root: Path, name: str, gate: bool = True) -> House:
        kind = KINDS[name]
        params = {"landing": str(root / "landing"), "warehouse": str(root / "warehouse")}
        options = {
            "WEIR_EPOCH__MAX_FILES": "1",
            "WEIR_CHECKPOINTS__NUM_RETAINED": "20",
            "WEIR_SPARK__PARALLELISM": "2",
            "WEIR_PIPELINES__EVERY__PARAMS": json.dumps(params),
        }
        house = cls(Site(root, options, pipeline_of(kind, gate), __name__), kind)
        for source in SOURCES:
            (house.site.landing / source).mkdir(parents=True)
        write_deltalake(str(root / "warehouse" / "t"), TABLE)
        return house

    def land(self, *days: int, more: int = 0) -> None:
        for number in days:
            for source in SOURCES[: 1 if self.kind.is_quiet and number > 1 else 2]:
                folder = self.site.landing / source
                pq.write_table(rows_of(number, source, more), folder / f".{number}")
                (folder / f".{number}").rename(folder / f"{number:05}.parquet")

    def run(self, *days: int, drain: bool = False) -> list:
        self.land(*days)
        return list(run(self.site.pipeline, self.site.settings, RunOptions(until_caught_up=True, drain=drain), HERE))

    @property
    def head(self) -> Checkpoint:
        return open_storage(self.site.pipeline, self.site.settings)[1].head()

    def rewind(self, to: int) -> None:
        """Back to a checkpoint, although files that would be read again are others now."""
        accepted = rewinding.plan(self.site.pipeline, self.site.settings, to).obstacles
        maintenance.rewind(self.site.pipeline, self.site.settings, to, accepted=accepted)

    def backfill(self, number: int, replaces: str) -> Backfilled:
        return backfill(
            self.site.pipeline, self.site.settings, day(number), day(number + 1), replaces=replaces, promote=True,
            executor=HERE,
        )  # fmt: skip

    def out(self) -> pl.DataFrame:
        table = pl.read_delta(str(self.site.storage / "tables" / "out"))
        if self.kind.key:
            table = table.sort("epoch").unique(self.kind.key, keep="last")
        return table.drop("epoch", "_change_type", strict=False)

    def expected(self) -> pl.DataFrame:
        with duckdb.connect() as db:
            for name in SOURCES:
                db.register(name, pl.read_parquet(str(self.site.landing / name / "*.parquet")))
            db.register("t", TABLE)
            db.sql("SET TimeZone = 'UTC'")
            return db.sql(self.kind.sql).pl()

    def assert_exact(self, within: pl.Expr | None = None) -> None:
        wanted = self.expected()
        shown = self.out().select(wanted.columns)
        if within is not None:
            wanted, shown = wanted.filter(within), shown.filter(within)
        exact = [name for name in wanted.columns if name not in self.kind.close]
        wanted, shown = (of.with_columns(pl.col(pl.Datetime).dt.epoch("us")).sort(exact) for of in (wanted, shown))
        assert shown.select(exact).rows() == wanted.select(exact).rows()
        for name in self.kind.close:
            off = (shown[name] - wanted[name]).abs()
            assert off.max() <= 1, name


TABLE = pa.table({"k": pa.array([0, 1, 2, 3], pa.int64()), "name": ["zero", "one", "two", "three"]})


# What an operation does depends on the shape of a kind's state and rows, so each operation is played with one kind of
# each shape, and each kind in some operation; Dagster is asked about all. The first of a list is in `make test`.
BRANCHED = [
    "semi_ttl",
    "of_others",
    "full",
    "as_of",
    "final_ranks",
    "changes",
    "aggregates",
    "by_clock",
    "outputs",
    "idle",
]
REPLAYED_SINCE = ["changes", "of_others", "select", "inner", "anti", "ttl", "lookup", "top_n", "windowed"]
REPLAYED_DAY = ["windowed", "stateless", "union", "right", "anti", "semi_ttl", "as_of", "final_ranks", "idle"]
GATED = ["as_of", "stateless", "left", "semi", "ttl", "top_n", "final_ranks", "changes", "windowed", "outputs"]
assert {*BRANCHED, *REPLAYED_SINCE, *REPLAYED_DAY, *GATED} == KINDS.keys()


@pytest.mark.parametrize("name", sampled(BRANCHED))
def test_branches_promotions_and_rewinds_lead_to_what_duckdb_says(tmp_path, name):
    house = House.at(tmp_path, name)
    pipeline, settings = house.site.pipeline, house.site.settings
    base = int(house.run(1, 2, 3)[0].checkpoint.id)
    once = RunOptions(until_caught_up=True)
    forks.fork(pipeline, settings, "same", base, "to see")
    list(run(forks.branched(pipeline, settings, "same"), settings, once, HERE))
    assert branch_diff.diff(pipeline, settings, "same").same or name == "by_clock"
    forks.drop(pipeline, settings, "same")
    house.land(2, more=100)
    forks.fork(pipeline, settings, "fix", base, "corrected")
    list(run(forks.branched(pipeline, settings, "fix"), settings, once, HERE))
    assert not branch_diff.diff(pipeline, settings, "fix").same
    promotion.promote(pipeline, settings, "fix", executor=HERE)
    house.run(4)
    house.run(drain=True)
    house.assert_exact()
    house.rewind(base)
    house.run(drain=True)
    house.assert_exact()


@pytest.mark.parametrize("name", sampled(REPLAYED_SINCE))
def test_a_backfill_of_all_since_a_day_gives_what_duckdb_says(tmp_path, name):
    house = House.at(tmp_path, name)
    house.run(1, 2, 3)
    house.land(2, more=100)
    assert house.backfill(2, "since").promoted is not None
    house.run(4, drain=True)
    house.assert_exact()


@pytest.mark.parametrize("name", sampled(REPLAYED_DAY))
def test_a_backfill_of_a_day_gives_that_day_what_duckdb_says_and_leaves_others(tmp_path, name):
    house = House.at(tmp_path, name)
    house.run(1, 2, 3, 4, 5)
    before = house.out()
    house.land(3, more=100)
    assert house.backfill(3, "range").promoted is not None
    is_of_day = pl.col(house.kind.day).is_between(day(3), day(4), closed="left")
    house.assert_exact(is_of_day)
    assert_frame_equal(house.out().filter(~is_of_day), before.filter(~is_of_day), check_row_order=False)


def test_a_day_of_changes_is_replaced_where_the_day_is_in_their_key_and_refused_where_others_take_them_back(tmp_path):
    """Else a log of the first two of each key would have more than two of some."""

    def house_of(name: str, made: Stage) -> House:
        house = House.at(tmp_path / name, "stateless", gate=False)
        handed_on = select("on", made, "*", sink=delta.append("out", event_time="day" if name == "by_day" else "at"))
        return House(replace(house.site, pipeline=Pipeline("every", (made, handed_on))), house.kind)

    ranks = house_of("ranks", top_n("made", A, key="k", by=[desc("v"), "seq"], n=2, rank=None))
    totals = aggregate("made", A, select=["date(at) AS day", "v"], key="day", total=agg.sum("v"), changes=True)
    by_day = house_of("by_day", totals)
    for house in (ranks, by_day):
        house.run(1, 2, 3)
        house.land(2, more=100)
    with pytest.raises(WeirError, match="its rows are changes, and rows of other days take theirs back") as refused:
        ranks.backfill(2, "range")
    assert "since" in refused.value.next
    assert by_day.backfill(2, "range").promoted is not None
    adds = pl.col("_change_type").is_in(["insert", "update_postimage"])
    log = pl.read_delta(str(by_day.site.storage / "tables" / "out")).filter(pl.col("day") == day(2).date())
    given = pl.concat(map(pl.read_parquet, by_day.site.landing.glob("a/*.parquet")))
    total = given.filter(pl.col("at").dt.date() == day(2).date())["v"].sum()
    assert log.select(pl.when(adds).then(pl.col("total")).otherwise(-pl.col("total")).sum()).item() == total


@pytest.mark.parametrize("name", sampled(GATED))
def test_a_gate_holds_what_it_refuses_and_corrected_input_gives_what_it_would_have_given(tmp_path, name):
    house = House.at(tmp_path, name)
    first = house.run(1)[0]
    house.land(2, more=BAD)
    with pytest.raises(GateError):
        house.run(3, 4, drain=True)
    assert (house.out().drop_nulls("v")["v"] < BAD).all()
    house.land(2)
    if house.head.id > first.checkpoint.id:  # the bad rows have been in state when they came out
        house.rewind(first.checkpoint.id)
    house.run(drain=True)
    house.assert_exact()


@pytest.mark.parametrize("name", sampled(KINDS, keep=lambda name: name == "final_ranks"))
def test_dagster_shows_of_each_column_which_columns_of_what_the_stage_reads_make_it(tmp_path, name):
    from dagster import AssetKey  # which takes a second to import

    from weir.dagster import metadata
    from weir.dagster.factory import weir_definitions

    house, tally = House.at(tmp_path, name, gate=False), metadata.Tally()
    for report in house.run(1, 2, drain=True):
        tally.add(report)
    pipeline, (storage, _) = house.site.pipeline, open_storage(house.site.pipeline, house.site.settings)
    graph = weir_definitions([pipeline], house.site.settings).resolve_asset_graph()
    columns = {AssetKey(["every", source]): set(COLUMNS.names) for source in SOURCES}
    columns[AssetKey(["every", "lookups", "t"])] = set(TABLE.column_names)
    for of in pipeline.stages:
        asset = AssetKey(["every", f"{of.uid}_stage"])
        shown = metadata.of_stage_run(pipeline, tally, of, storage)
        columns[asset] = {column.name for column in shown["dagster/column_schema"].columns}
        made = shown["dagster/column_lineage"].deps_by_column
        assert (
            columns[asset] - made.keys() - {"epoch", "_change_type", "n", "window_start", "window_end"}
            <= house.kind.new
        )
        for dep in itertools.chain.from_iterable(made.values()):
            assert dep.asset_key in graph.get(asset).parent_keys and dep.column_name in columns[dep.asset_key]
