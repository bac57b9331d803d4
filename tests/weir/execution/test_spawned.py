"""Processes that multiprocessing spawned, as Dagster's runs are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weir.settings.configuration import PROJECT

# PySpark ends a process whose main module has neither file nor spec: `python -c` gives one, as spawning does.
PROBE = "from weir.gates import evaluation as gates; gates.load(); print('loaded')"


@pytest.mark.long
def test_gates_load_in_a_process_without_a_main_file():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "loaded"), done.stderr


def test_such_a_process_can_spawn_further_ones():
    probe = (
        "from weir.execution.spark.imports import name_main_module; name_main_module(); import"
        " multiprocessing as m;p = m.get_context('spawn').Process(target=print, args=('child',)); p.start(); p.join();"
        " print(p.exitcode)"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["child", "0"], done.stderr
