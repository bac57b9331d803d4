"""The jobs on the pages of docs/coming-from do what the same job does elsewhere: each is run as it stands there."""

from __future__ import annotations

import json
import sys
import types
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from tests.playbooks import page as reading
from tests.recovery.harness import Site
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT

PAGES = PROJECT / "docs" / "coming-from"
NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)


def modules_of(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """The files of a page, imported, by their names."""
    modules = {}
    for step in reading.steps(PAGES / f"{page}.md"):
        if step.kind == "file":
            name = reading.file_of(step.text).removesuffix(".py")
            modules[name] = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, modules[name])
            exec(compile(step.text, f"{page}.md", "exec"), modules[name].__dict__)
    return modules


def site_of(root: Path, module: types.ModuleType) -> Site:
    return Site(root, {"WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "0"}, module.pipeline, module.__name__)


def run_it(site: Site) -> None:
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def at(minutes: float) -> datetime:
    return NINE + timedelta(minutes=minutes)


def lines(folder: Path, name: str, rows: list[dict], bad: str | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [json.dumps(row, default=lambda moment: f"{moment:%Y-%m-%dT%H:%M:%SZ}") for row in rows]
    (folder / f".{name}").write_text("".join(f"{text}\n" for text in [*texts, *filter(None, [bad])]))
    (folder / f".{name}").rename(folder / name)


def click(user: str, page: str, minutes: float) -> dict:
    return {"user": user, "page": page, "at": at(minutes)}


FIRST = [click("ada", "/", 1), click("ada", "/tea", 20), click("bob", "/", 30), click("bob", "/", 100), click("ada", "/", 130)]  # fmt: skip
SECOND = [click("cleo", "/", 5), click("cleo", "/", 200), click("ada", "/", 205)]  # the first one is late
HOURS = {("/", at(0), 2), ("/tea", at(0), 1), ("/", at(60), 1), ("/", at(120), 1)}
SESSIONS = {("ada", at(1), 2), ("bob", at(30), 1), ("bob", at(100), 1), ("ada", at(130), 1)}


def clicks_of(module: types.ModuleType, root: Path, between: list) -> Site:
    """Two files arrive, one after the other; what stands in `between` is called after each."""
    site = site_of(root, module)
    for name, rows, bad in (("1.json", FIRST, '{"user": "ada", '), ("2.json", SECOND, None)):
        lines(site.landing, name, rows, bad)
        run_it(site)
        for call in between:
            call()
    return site


def rows_of(site: Site, table: str, *columns: str) -> set[tuple]:
    rows = pl.from_pandas(site.table(table)).select(columns).rows()
    assert len(rows) == len(set(rows))
    return set(rows)


def test_clicks_by_the_hour_and_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = clicks_of(modules_of("spark-structured-streaming", monkeypatch)["clicks"], tmp_path, [])
    assert rows_of(site, "hourly", "page", "window_start", "views") == HOURS
    assert rows_of(site, "hourly_late", "user", "at") == {("cleo", at(5))}
    assert rows_of(site, "sessions", "user", "window_start", "pages") == SESSIONS
    (bad,) = site.table("hourly_quarantine").to_dict("records")
    assert bad["_weir_file"] == "1.json"


@pytest.mark.long
def test_spark_says_the_same(spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    modules = modules_of("spark-structured-streaming", monkeypatch)
    on_spark, landing = modules["clicks_on_spark"], str(tmp_path / "landing")

    def together() -> None:
        for name in ("hourly", "sessions"):
            rows = getattr(on_spark, name)(spark, landing)
            on_spark.start(rows, name, str(tmp_path / "spark")).awaitTermination()

    clicks_of(modules["clicks"], tmp_path, [together])
    for name, value, expected in (("hourly", "views", HOURS), ("sessions", "pages", SESSIONS)):
        rows = pl.read_parquet(tmp_path / "spark" / name / "*.parquet").with_columns(
            pl.col("window_start").dt.epoch("s")
        )
        key = "page" if name == "hourly" else "user"
        assert set(rows.select(key, "window_start", value).rows()) == {
            (of, int(begin.timestamp()), number) for of, begin, number in expected
        }


def test_cards_that_are_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = site_of(tmp_path, modules_of("flink", monkeypatch)["payments"])
    site.landing.mkdir()
    days = [
        [("a", 0.0, 1.0), ("b", 0.2, 2.0), ("a", 30.0, 3.0), ("a", 30.5, 4.0), ("b", 70.0, 5.0)],
        [("a", 2.0, 6.0), ("b", 70.9, 7.0), ("b", 140.0, 8.0)],
    ]
    for number, rows in enumerate(days):
        frame = pl.DataFrame([{"card": card, "at": at(minutes), "amount": amount} for card, minutes, amount in rows])
        frame.write_parquet(site.landing / f".{number}.parquet")
        (site.landing / f".{number}.parquet").rename(site.landing / f"{number}.parquet")
        run_it(site)
    assert rows_of(site, "alerts", "card", "amount") == {("a", 4.0), ("b", 7.0)}
    assert rows_of(site, "hourly", "card", "window_start", "amount") == {
        ("a", at(0), 8.0), ("b", at(0), 2.0), ("b", at(60), 12.0),
    }  # fmt: skip
    assert rows_of(site, "hourly_late", "card", "amount") == {("a", 6.0)}


def test_orders_once_with_their_newest_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = site_of(tmp_path, modules_of("dlt", monkeypatch)["orders_by_hour"])

    def order(number: int, amount: object, minutes: float) -> dict:
        return {"id": number, "customer": "ada", "amount": amount, "updated": at(minutes)}

    lines(site.landing, "1.json", [order(1, 5.0, 0), order(2, 7.0, 1), order(3, "seven", 2)])
    run_it(site)
    lines(site.landing, "2.json", [order(1, 6.0, 90)])
    run_it(site)
    assert rows_of(site, "orders", "id", "amount") == {(1, 6.0), (2, 7.0)}
    assert rows_of(site, "hourly", "customer", "window_start", "amount") == {("ada", at(0), 12.0)}
    assert set(site.table("newest_quarantine")["_weir_file"]) == {"1.json"}
