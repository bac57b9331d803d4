"""Brings a process to a halt in the middle of its work, so that a test can kill it there.

Python imports this module at its start wherever this directory is on PYTHONPATH: in the coordinator that a test starts
and in all of its Python workers. HOLD_AT names one of `POINTS`, HOLD_EPOCH the epoch. The process that gets there first
creates the file HOLD_MARKER and does not go on before there is a file HOLD_RELEASE.

Weir itself has no hooks for this: each point wraps one function of it after its module was imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import itertools
import os
import sys
import threading
import time
from pathlib import Path


def _hold() -> None:
    Path(os.environ["HOLD_MARKER"]).write_text(str(os.getpid()))
    while not Path(os.environ["HOLD_RELEASE"]).exists():
        time.sleep(0.02)


def _in_a_stage(module, epoch: int) -> None:
    """In a worker: the stage's function has changed state, and the epoch's barrier has not come."""
    process = module.FunctionOperator.process

    def held(self, rows):
        yield from process(self, rows)
        if self._epoch.id == epoch:
            _hold()

    module.FunctionOperator.process = held


def _in_an_upload(module, epoch: int) -> None:
    """In a worker: two of a snapshot's files are in storage, the rest and the staged rows are not."""
    put_file, calls = module.Storage.put_file, itertools.count(1)

    def held(self, local, path, **options):
        done = put_file(self, local, path, **options)
        if path.startswith("state/") and f"-e{epoch}/" in path and next(calls) == 2:
            _hold()
        return done

    module.Storage.put_file = held


def _between_two_jobs(module, epoch: int) -> None:
    """In the coordinator: all blocks of a stage are in storage, and no subtask has read one."""
    collected = module.collected

    def held(storage, staged):
        extents = collected(storage, staged)
        if any(f"-e{epoch}/" in extent.path for mine in extents.values() for extent in mine):
            _hold()
        return extents

    module.collected = held


def _before_the_row(module, epoch: int) -> None:
    """All has been staged, the listing is committed, the checkpoint's row is not."""
    commit = module.FencedTable.commit

    def held(self, generation, adds=(), removes=(), check=None):
        if self.path == "registry/checkpoints" and any(("id", epoch) in file.bounds for file in adds):
            _hold()
        return commit(self, generation, adds, removes, check)

    module.FencedTable.commit = held


def _after_the_row(module, epoch: int) -> None:
    """The checkpoint exists, nothing of it is published."""
    commit = module.Registry.commit

    def held(self, checkpoint, files):
        commit(self, checkpoint, files)
        if checkpoint.id == epoch:
            _hold()

    module.Registry.commit = held


def _between_two_sinks(module, epoch: int) -> None:
    """The flights' legs have their rows, the hours have not; both are published at once."""
    publish, first = module.publish, threading.Event()

    def held(storage, app_id, table, checkpoint, *more, **options):
        if checkpoint.id == epoch and table == "airport_hourly":
            first.wait()
            _hold()
        published = publish(storage, app_id, table, checkpoint, *more, **options)
        if checkpoint.id == epoch:
            first.set()
        return published

    module.publish = held


def _in_pruning(module, epoch: int) -> None:
    """The dropped checkpoint's rows are gone, one of its objects is, the others are still there."""
    delete_files = module.Storage.delete_files

    def held(self, paths):
        state = [path for path in paths if path.startswith("state/")]
        if len(state) > 1:
            delete_files(self, state[:1])
            _hold()
        delete_files(self, paths)

    module.Storage.delete_files = held


POINTS = {
    "in a stage": ("weir.operators.functions.function", _in_a_stage),
    "in an upload": ("state_ops.storage.storage", _in_an_upload),
    "between two jobs": ("weir.execution.staged_blocks", _between_two_jobs),
    "before the row": ("state_ops.delta.fenced_table", _before_the_row),
    "after the row": ("state_ops.checkpoints.registry", _after_the_row),
    "between two sinks": ("weir.connectors.delta.append", _between_two_sinks),
    "in pruning": ("state_ops.storage.storage", _in_pruning),
}


class _Wrapper(importlib.abc.MetaPathFinder):
    """Imports one module as everyone does, then wraps a function in it."""

    def __init__(self, module: str, wrap, epoch: int) -> None:
        self._module, self._wrap, self._epoch = module, wrap, epoch

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002  the signature is Python's
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def executed(module) -> None:
            execute(module)
            self._wrap(module, self._epoch)

        spec.loader.exec_module = executed
        return spec


if "HOLD_AT" in os.environ:
    sys.meta_path.insert(0, _Wrapper(*POINTS[os.environ["HOLD_AT"]], int(os.environ["HOLD_EPOCH"])))
