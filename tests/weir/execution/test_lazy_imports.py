"""Libraries that any thread may be the first to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.execution.spark import imports
from weir.settings.configuration import PROJECT

# Every thread begins with another function that needs PySpark, and every trial with another thread.
THREADS = r"""
import sys, threading
import pyarrow as pa
from types import SimpleNamespace
from weir.settings.configuration import load
from weir.execution.spark import placement, spark_errors, spark_executor, spark_plan, spark_session, spark_task

spark_session.class_archive = None  # so that it raises at the latest where the JVM would start
schema = pa.schema([("k", pa.string())])
stage = SimpleNamespace(uid="s", gates=(), key=("k",), order_by=(), inputs=())
calls = [
    lambda: spark_executor.SparkExecutor(load(), "trial").session,
    lambda: spark_plan.as_spark_has(schema, "trial"),
    lambda: spark_errors.of_job(stage, ValueError("x"), "local[2]", None),
    lambda: spark_task._context(),
    lambda: spark_plan.exchanged(stage, None, 2, 8),
    lambda: spark_plan.prepared(stage, SimpleNamespace(), None),
    lambda: spark_plan.schema_of(None),
    lambda: spark_session._with_patience(None),
]
first = int(sys.argv[1])
calls, errors = (calls[first:] + calls[:first]) * 4, []
together = threading.Barrier(len(calls))
sys.setswitchinterval(1e-5)


def begin(call):
    together.wait()
    try:
        call()
    except BaseException as error:
        errors.append(error)


threads = [threading.Thread(target=begin, args=(call,)) for call in calls]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
bad = [error for error in errors if isinstance(error, (ImportError, RuntimeError)) and "import" in repr(error).lower()]
bad += [error for error in errors if type(error).__name__ == "_DeadlockError" or "partially initialized" in str(error)]
print(bad)
"""


@pytest.mark.parametrize("first", range(8))
def test_many_threads_import_pyspark_at_once(first: int):
    done = subprocess.run([sys.executable, "-c", THREADS, str(first)], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def lazy_imports(path: Path) -> Iterator[tuple[ast.FunctionDef, ast.stmt, list[str]]]:
    """Yield the imports of PySpark and Great Expectations within functions of a file, with the modules' names."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for found in ast.walk(function):
            match found:
                case ast.Import():
                    names = [alias.name for alias in found.names]
                case ast.ImportFrom(module=str(module)):
                    names = [module]
                case _:
                    continue
            if names[0].partition(".")[0] in ("pyspark", "great_expectations"):
                yield function, found, names


def test_a_function_that_imports_pyspark_has_it_loaded_first_by_one_thread_at_a_time():
    seen = 0
    for path in [file for room in ("weir", "pipelines", "infra", "assets") for file in (PROJECT / room).rglob("*.py")]:
        if path == Path(imports.__file__):
            continue
        for function, found, names in lazy_imports(path):
            before = {
                call.func.id
                for call in ast.walk(function)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.lineno < found.lineno
            }
            place = f"{path.relative_to(PROJECT)}:{found.lineno}"
            if names[0].startswith("pyspark"):
                assert before & {"load_pyspark", "load_connect"}, place
                assert {*names} <= {*imports._PYSPARK, *imports._CONNECT}, f"{place}: another thread may import it"
            else:  # who has one of its objects has loaded it
                assert "load_great_expectations" in before or names[0] != "great_expectations", place
            seen += 1
    assert seen > 20
