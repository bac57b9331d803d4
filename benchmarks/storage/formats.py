"""What it costs to decode CSV, JSON lines and Avro, beside Spark's own readers of the same files.

    python -m benchmarks.storage.formats                            # three minutes
    python -m benchmarks.storage.formats --quick --results /tmp/formats

Both read the same file whole, in turns, with a declared schema, in memory of the operating system. Spark counts the
rows of all columns into its noop sink, Weir throws away the batches. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import typer

from benchmarks import harness
from benchmarks.harness import Row
from weir.connectors.formats.decoding import decode
from weir.execution.spark import spark_plan, spark_session
from weir.execution.spark.spark_jars import fetch, locked_jars
from weir.settings import configuration as settings

FORMATS = ("csv", "json", "avro")
SCHEMA = pa.schema(
    [
        ("id", pa.int64()), ("user", pa.int64()), ("price", pa.float64()), ("name", pa.string()),
        ("paid", pa.bool_()), ("at", pa.timestamp("us", "UTC")),
    ]
)  # fmt: skip


def write(directory: Path, rows: int) -> dict[str, Path]:
    """The same rows in each format but Avro."""
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 1_000_000, rows)
    frame = pl.DataFrame(
        {
            "id": np.arange(rows),
            "user": rng.integers(0, 1_000_000_000, rows),
            "price": rng.integers(0, 1_000_000, rows) / 100,
            "name": [f"user number {number}" for number in numbers],
            "paid": numbers % 2 == 0,
            "at": pl.Series(1_700_000_000_000_000 + rng.integers(0, 10**12, rows)).cast(pl.Datetime("us", "UTC")),
        }
    )
    texts = frame.with_columns(pl.col("at").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"))
    files = {format: directory / f"rows.{format}" for format in ("csv", "json")}
    texts.write_csv(files["csv"])
    texts.write_ndjson(files["json"])
    return files


def by_weir(format: str, file: Path) -> Callable[[], int]:
    """Reads a file; gives the sum of a column, so that both have read the same."""

    def read() -> int:
        total = 0
        with pa.OSFile(str(file)) as stream:
            for batch in decode(format, {}, stream, SCHEMA, str(file)):
                assert not batch.rejected
                total += pc.sum(batch.rows.column("user")).as_py()
        return total

    return read


def by_spark(spark: Any, format: str, file: Path) -> Callable[[], None]:
    frame = _frame(spark, format, file)
    return lambda: frame.write.format("noop").mode("overwrite").save()


def _frame(spark: Any, format: str, file: Path) -> Any:
    reader = spark.read.format(format).schema(spark_plan.spark_schema(SCHEMA, "benchmark"))
    return (reader.option("header", True) if format == "csv" else reader).load(str(file))


def measured(directory: Path, rows: int, repetitions: int) -> Iterator[Row]:
    files = write(directory, rows)
    with_avro = settings.load({})
    jars = ",".join(map(str, fetch(locked_jars("avro"), with_avro.cache_dir)))
    conf = {**with_avro.spark.conf, "spark.jars": jars}
    with_avro = with_avro.model_copy(update={"spark": with_avro.spark.model_copy(update={"conf": conf})})
    spark = spark_session.session(with_avro, app="weir-benchmark-formats")
    _frame(spark, "csv", files["csv"]).coalesce(1).write.format("avro").save(str(directory / "avro"))
    files["avro"] = next((directory / "avro").glob("*.avro"))
    for format, file in files.items():
        ours, theirs = by_weir(format, file), by_spark(spark, format, file)
        same = _frame(spark, format, file).selectExpr("sum(user)").collect()[0][0] == ours()
        if not same:
            raise RuntimeError(f"Spark and Weir read other rows of {format}")
        for _ in range(repetitions):
            for reader, call in (("weir", ours), ("spark", theirs)):
                (took, used), paces = harness.measure_steadily(lambda call=call: _once(call))  # type: ignore[misc]
                mb = file.stat().st_size / 1e6
                yield {
                    "format": format, "reader": reader, "rows_per_second": rows / took, "mb_per_second": mb / took,
                    "cpu": used, "seconds": took, "paces": paces,
                }  # fmt: skip
    spark.stop()


def _once(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the wall clock, and of the processors of this process and the JVM."""
    before = harness.cpu_seconds()
    took = harness.seconds(call)
    return took, harness.cpu_seconds() - before


def report(figures: Row) -> str:
    """The Markdown of what was measured: medians by format and reader."""
    measurements = harness.at_usual_pace(figures["measurements"], lambda row: row["paces"])
    names = ("rows_per_second", "mb_per_second", "seconds", "cpu")
    table: dict[str, dict[str, dict[str, float]]] = {}
    for format in FORMATS:
        for reader in ("weir", "spark"):
            of_all, usual = (
                [row for row in rows if (row["format"], row["reader"]) == (format, reader)]
                for rows in (figures["measurements"], measurements)
            )
            same = usual or of_all
            table.setdefault(format, {})[reader] = harness.medians(
                [{name: row[name] for name in names} for row in same]
            )
    pace = harness.pace_sentence(figures["measurements"], len(measurements), lambda row: row["paces"])
    return harness.render("formats", **{**figures, "formats": table, "pace": pace})


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a twentieth of the rows, once")] = False,
    rows: int = 1_000_000,
    reps: int = 3,
    results: Annotated[Path, typer.Option(help="report's path, without suffix")] = harness.RESULTS / "formats",
) -> None:
    """What it costs to decode CSV, JSON lines and Avro, beside Spark's own readers of the same files."""
    rows, repetitions = (rows // 20, 1) if quick else (rows, reps)
    measurements = harness.in_scratch(lambda root: list(measured(root, rows, repetitions)))
    figures = {
        "machine": harness.machine(), "repetitions": repetitions, "rows": rows, "measurements": measurements,
    }  # fmt: skip
    harness.publish(results, figures, report(figures))


if __name__ == "__main__":
    typer.run(main)
