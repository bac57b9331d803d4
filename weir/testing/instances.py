"""State as instances of its State class, by key: for tests of stages, which are small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.errors import from_report
from state_ops.keyed.keyed_state import scan_values
from state_ops.keyed.list_state import scan_list
from state_ops.keyed.map_state import scan_map
from state_ops.keyed.ttl import Expiry, visible
from state_ops.records.snapshot_files import Snapshot, snapshots_of
from state_ops.schema.descriptors import LIST, Collection
from state_ops.schema.state_class import State
from weir.definition import Shapes
from weir.execution.in_process import routed
from weir.operators.functions import Function
from weir.task import run_task
from weir.task.run_task import KeyedTask

_NUMBER = "__weir_number"


def snapshots(task: KeyedTask, states: Mapping[Any, State]) -> dict[int, Snapshot]:
    """Return by subtask a snapshot of these states, which the task may build on.

    A task of its own puts them, key by key.
    """
    instances = list(states.values())

    def put(_: Any, rows: list[dict[str, Any]], state: Any, __: Any) -> None:
        instance = instances[rows[0][_NUMBER]]
        fields = {field.name: getattr(instance, field.name) for field in visible(task.shapes.state)}
        state.update(type(instance)(**fields))
        for declared in task.shapes.collections:
            collection, elements = getattr(state, declared.name), getattr(instance, declared.name)
            for element in elements:
                if declared.kind == LIST:
                    collection.append(element)
                else:
                    collection[element] = elements[element]

    stage = replace(
        task.stage, operator=Function(put, task.stage.state, ttl=task.stage.lifetime, per_key=True), gates=()
    )
    keys = [key if isinstance(key, tuple) else (key,) for key in states]
    columns = [pa.array([key[number] for key in keys], field.type) for number, field in enumerate(task.shapes.keys)]
    rows = pa.table([*columns, range(len(keys))], names=[*task.shapes.keys.names, _NUMBER])
    parts = routed(replace(stage, order_by=()), rows, task.parallelism, task.max_parallelism, len(keys))
    acks = [run_task.run(replace(task, stage=stage, cache=None), *part) for part in enumerate(map(iter, parts))]
    for ack in acks:
        if ack.error is not None:
            raise from_report(ack.error)
    return snapshots_of(tuple(file for ack in acks for file in ack.files), stage.uid)


def read(backend: Backend, shapes: Shapes, groups: range, cls: Any, expiry: Expiry | None) -> Mapping[Any, State]:
    """Return the instances by key, a tuple where the key has several columns.

    Args:
        cls: Their class.
    """
    states: dict[Any, State] = {}
    for table in scan_values(backend, shapes.state, shapes.keys, groups, expiry):
        names = shapes.keys.names
        for key, row in zip(_keys(table.select(names)), table.drop_columns(names).to_pylist(), strict=True):
            states[key] = cls(**row)
    for declared in shapes.collections:
        scan = scan_list if declared.kind == LIST else scan_map
        for owners, entries in scan(backend, declared, shapes.keys, groups, expiry):
            for key, row in zip(_keys(owners), entries.to_pylist(), strict=True):
                elements = getattr(states.setdefault(key, cls()), declared.name)
                if declared.kind == LIST:
                    elements.append(_element(declared, row))
                else:
                    entry = row.pop(declared.key_column)  # before the element takes what is left
                    elements[entry] = _element(declared, row)
    return states


def _keys(columns: pa.Table) -> list[Any]:
    """Return the keys of rows, each a tuple where it has several columns."""
    keys = [tuple(row.values()) for row in columns.to_pylist()]
    return [key if len(key) > 1 else key[0] for key in keys]


def _element(declared: Collection, row: dict[str, Any]) -> Any:
    if declared.row is not None:
        return declared.row(**row)
    return row[declared.name] if list(row) == [declared.name] else row
