"""PyFlink SQL: a grouped aggregation that runs in the JVM alone.

The sink is `blackhole`, the peer's best case: Flink's file sinks take updates only as a change log in JSON. A run of
its own with that sink, which is not measured, shows that the same query computes the right thing.
"""

from __future__ import annotations

from benchmarks.state import flink
from benchmarks.state.engine import Result, Task, serve


def run(task: Task, result: Result) -> None:
    tables = flink.environment(task, result)
    flink.source(tables, task)
    last = ", MAX(payload) AS payload" if task.payload else ""
    grouped = (
        "SELECT `key`, COUNT(*) AS n, SUM(`value`) AS total, MAX(`value`) AS top" + last + " FROM events GROUP BY `key`"
    )
    text = ", payload STRING" if task.payload else ""
    sink = "'connector' = 'blackhole'"
    if task.options.get("checked"):
        sink = f"'connector' = 'filesystem', 'path' = 'file://{task.durable}/output', 'format' = 'debezium-json'"
        result.output, result.form = [f"{task.durable}/output/*"], "debezium-json"
    tables.execute_sql(f"CREATE TABLE changed (`key` BIGINT, n BIGINT, total DOUBLE, top DOUBLE{text}) WITH ({sink})")
    result.settings["sink"] = "blackhole"
    flink.run_to_end(task, result, tables.execute_sql(f"INSERT INTO changed {grouped}"), "GroupAggregate")


if __name__ == "__main__":
    serve(run)
