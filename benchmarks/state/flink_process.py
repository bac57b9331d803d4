"""PyFlink's KeyedProcessFunction: the author's Python function on the state of one key, called for every event.

It hands out the key's new row for every event, which a file sink writes as Parquet.
"""

from __future__ import annotations

from typing import Any

from benchmarks.state import flink
from benchmarks.state.engine import BAND, Result, Task, serve

_DAY_MS = 86_400_000


def run(task: Task, result: Result) -> None:
    from pyflink.common import Row, Types
    from pyflink.datastream import KeyedProcessFunction, RuntimeContext
    from pyflink.datastream.state import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
    from pyflink.table import DataTypes, Schema

    tables = flink.environment(task, result)
    flink.source(tables, task)
    fields = [Types.LONG(), Types.DOUBLE(), Types.DOUBLE(), *([Types.STRING()] if task.payload else [])]

    class Totals(KeyedProcessFunction):
        def open(self, runtime_context: RuntimeContext) -> None:
            self.totals = runtime_context.get_state(ValueStateDescriptor("totals", Types.TUPLE(fields)))

        def process_element(self, value: Any, ctx: KeyedProcessFunction.Context) -> Any:  # noqa: ARG002
            held = self.totals.value()
            key, amount, *text = value
            if held is None:
                now = (1, amount, amount, *text)
            else:
                now = (held[0] + 1, held[1] + amount, max(held[2], amount), *map(max, held[3:], text))
            self.totals.update(now)
            yield Row(key, *now)

    class Collected(Totals):
        """And each event appends to a list, changes an entry of a map and sets a timer, due after the run."""

        def open(self, runtime_context: RuntimeContext) -> None:
            super().open(runtime_context)
            self.values = runtime_context.get_list_state(ListStateDescriptor("values", Types.DOUBLE()))
            self.bands = runtime_context.get_map_state(MapStateDescriptor("bands", Types.LONG(), Types.LONG()))

        def process_element(self, value: Any, ctx: KeyedProcessFunction.Context) -> Any:
            self.values.add(value[1])
            band = int(value[1]) // BAND
            self.bands.put(band, (self.bands.get(band) or 0) + 1)
            timers = ctx.timer_service()
            timers.register_processing_time_timer(timers.current_processing_time() + _DAY_MS)
            yield from super().process_element(value, ctx)

        def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Any:  # noqa: ARG002
            yield from ()

    names = ["key", "n", "total", "top", *(["payload"] if task.payload else [])]
    changed = (
        tables.to_data_stream(tables.from_path("events"))
        .key_by(lambda row: row[0], key_type=Types.LONG())
        .process(
            Collected() if task.options.get("collected") else Totals(),
            output_type=Types.ROW_NAMED(names, [Types.LONG(), *fields]),
        )
    )
    columns = {"key": "BIGINT", "n": "BIGINT", "total": "DOUBLE", "top": "DOUBLE", "payload": "STRING"}
    types = {"BIGINT": DataTypes.BIGINT(), "DOUBLE": DataTypes.DOUBLE(), "STRING": DataTypes.STRING()}
    schema = Schema.new_builder()
    for name in names:
        schema = schema.column(name, types[columns[name]])
    tables.create_temporary_view("changed", tables.from_data_stream(changed, schema.build()))
    declared = ", ".join(f"`{name}` {columns[name]}" for name in names)
    tables.execute_sql(
        f"CREATE TABLE written ({declared}) WITH ("
        f"'connector' = 'filesystem', 'path' = 'file://{task.durable}/output', 'format' = 'parquet')"
    )
    flink.run_to_end(task, result, tables.execute_sql("INSERT INTO written SELECT * FROM changed"), "KEYED PROCESS")
    result.settings["sink"] = "filesystem, Parquet"
    result.output = [f"{task.durable}/output/*"]


if __name__ == "__main__":
    serve(run)
