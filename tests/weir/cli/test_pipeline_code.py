"""What is said of a pipeline's module that cannot be imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from state_ops.errors import ConfigurationError, PipelineError
from weir.cli.main import _quiet_logs
from weir.loading import load_pipeline
from weir.settings.configuration import Settings


def of(object: str) -> Settings:
    return Settings.model_validate({"pipelines": {"small": {"object": object}}})


@pytest.mark.parametrize(
    ("code", "said", "line"),
    [
        ("from weir import foreach\n\nsink = foreach('hook', print)\n", "TypeError: foreach() takes 1", 3),
        ("import weir_missing_library\n", "ModuleNotFoundError: No module named 'weir_missing_library'", 1),
        ("import os\nfrom weir import deltas\n", "ImportError: cannot import name 'deltas'", 2),
        ("def f(:\n", "SyntaxError: ", 1),
        ("import sys\n\nsys.exit('no warehouse is set')\n", "SystemExit: no warehouse is set", 3),
    ],
    ids=["a wrong call", "a library that is missing", "a name that is missing", "no Python", "an end"],
)
def test_code_that_raises_is_named_with_its_line(
    code: str, said: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "weir_broken_code.py").write_text(code)
    with pytest.raises(PipelineError, match=re.escape(said)) as refused:
        load_pipeline("small", of("weir_broken_code:pipeline"))
    assert refused.value.where == f"{tmp_path / 'weir_broken_code.py'}:{line}"


@pytest.mark.parametrize(
    ("code", "write"),
    [
        ("from pipelines.api import Pipeline\n", "write weir for pipelines.api"),
        ("from pipelines import testing\n", "write weir.testing for pipelines.testing"),
        ("import pipelines.runtime.run.run\n", "write weir for pipelines.runtime"),
        ("from configs import settings\n", "write weir.settings.configuration for configs.settings"),
    ],
)
def test_code_that_imports_weir_by_a_name_of_before_is_told_todays(
    code: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "weir_code_of_before.py").write_text(code)
    monkeypatch.delitem(sys.modules, "weir_code_of_before", raising=False)
    with pytest.raises(PipelineError) as refused:
        load_pipeline("small", of("weir_code_of_before:pipeline"))
    assert write in str(refused.value.next) and "docs/how-to/project.md" in str(refused.value.next)


@pytest.mark.parametrize("object", ["weir_nowhere:pipeline", "pipelines.nowhere:pipeline", "pipelines.flights:nowhere"])
def test_a_module_or_a_name_that_is_not_there_is_the_configurations(object: str) -> None:
    with pytest.raises(ConfigurationError, match="The pipeline 'small' cannot be imported") as refused:
        load_pipeline("small", of(object))
    assert refused.value.where == f"pipelines.small.object = {object}"


def test_a_plan_that_spark_refuses_is_shown_by_weir_alone(capfd: pytest.CaptureFixture[str]) -> None:
    from pyspark.logger import PySparkLogger

    _quiet_logs(debug=False)
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).exception("[UNRESOLVED_COLUMN]", errorClass="UNRESOLVED_COLUMN")
    assert "UNRESOLVED" not in capfd.readouterr().err
