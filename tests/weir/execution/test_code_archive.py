"""What executors on other hosts get of the project: what can be imported from its folder, and nothing else that lies
there."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from weir.execution.spark import code_archive, spark_session
from weir.settings import configuration as settings


def _write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _imported(archive: Path, *modules: str) -> dict[str, str]:
    """What modules call NAME, each imported from the archive alone."""
    code = "import importlib, json, sys; sys.path.insert(0, sys.argv[1])\n"
    code += "print(json.dumps({name: importlib.import_module(name).NAME for name in sys.argv[2:]}))"
    command = [sys.executable, "-I", "-c", code, str(archive), *modules]
    return json.loads(subprocess.run(command, check=True, capture_output=True, cwd="/").stdout)


def test_a_package_of_your_own_is_shipped_whatever_it_is_called(tmp_path):
    project, lent = tmp_path / "project", tmp_path / "lent"
    _write(
        project,
        {
            "pipelines/__init__.py": "NAME = 'pipelines'",
            "acme/__init__.py": "",
            "acme/_rules/__init__.py": "from importlib import resources\n"
            "NAME = resources.files(__name__).joinpath('limits.txt').read_text()",
            "acme/_rules/limits.txt": "with its data",
            "tests/deep/er.py": "NAME = 'a package without __init__.py'",
            "single.py": "NAME = 'a module'",
            ".secret/__init__.py": "",
            "acme/.env": "password",
            "venv/pyvenv.cfg": "",
            "venv/lib/big.py": "",
            "data/read_me.py": "",
            "data/rows.parquet": "large",
        },
    )
    (project / "acme" / "up").symlink_to(project / "acme")
    (project / "linked").symlink_to(lent, target_is_directory=True)
    _write(lent, {"__init__.py": "NAME = 'linked from elsewhere'"})
    archive = code_archive.pack(tmp_path, code_archive.of_project(project))
    names = ("pipelines", "acme._rules", "tests.deep.er", "single", "linked")
    assert _imported(archive, *names) == {
        "pipelines": "pipelines",
        "acme._rules": "with its data",
        "tests.deep.er": "a package without __init__.py",
        "single": "a module",
        "linked": "linked from elsewhere",
    }
    with zipfile.ZipFile(archive) as packed:
        files = {name for name in packed.namelist() if not name.endswith("/")}
    assert not {name for name in files if "secret" in name or "venv" in name or ".env" in name or "parquet" in name}
    assert "acme/up/__init__.py" not in files


def test_settings_stay_since_they_may_have_secrets(tmp_path):
    _write(
        tmp_path,
        {
            "configs/__init__.py": "",
            "configs/prod.yaml": "connections: {db: {options: {password: in-the-clear}}}",
            "configs/hosts/east.yml": "",
            "acme/__init__.py": "",
            "acme/chosen.yaml": "",
            "acme/limits.yaml": "",
        },
    )
    (tmp_path / "acme/also_chosen.yaml").symlink_to(tmp_path / "acme/chosen.yaml")
    found = code_archive.of_project(tmp_path)
    kept = dict(code_archive.without_settings(found, tmp_path, tmp_path / "acme/chosen.yaml"))
    assert set(kept) == {"configs/__init__.py", "acme/__init__.py", "acme/limits.yaml"}


def test_what_the_run_has_imported_from_another_folder_is_shipped_too(tmp_path, monkeypatch):
    _write(tmp_path / "lib", {"lent_rules/__init__.py": "", "lent_rules/limits.py": "NAME = 'lent'"})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    import lent_rules.limits  # type: ignore[import-not-found]

    modules = [lent_rules, lent_rules.limits, pytest, json, sys]
    files = dict(code_archive.of_modules(modules))
    assert set(files) == {"lent_rules/__init__.py", "lent_rules/limits.py"}
    assert _imported(code_archive.pack(tmp_path, files.items()), "lent_rules.limits") == {"lent_rules.limits": "lent"}


def test_the_same_code_makes_the_same_archive(tmp_path):
    _write(tmp_path / "project", {"acme/__init__.py": "NAME = 1"})
    first = code_archive.pack(tmp_path, code_archive.of_project(tmp_path / "project"))
    content = first.read_bytes()
    (tmp_path / "project/acme/__init__.py").touch()
    again = code_archive.pack(tmp_path, code_archive.of_project(tmp_path / "project"))
    assert again == first and again.read_bytes() == content


@pytest.mark.parametrize(
    ("master", "configured", "variable", "python"),
    [
        ("local[2]", {}, None, sys.executable),
        ("local[2]", {}, "/opt/other/python", "/opt/other/python"),
        ("spark://master:7077", {}, None, None),
        ("spark://master:7077", {}, "/opt/python", "/opt/python"),
        ("spark://master:7077", {"python": "/opt/weir/python"}, "/opt/python", "/opt/weir/python"),
        ("yarn", {"conf": {"spark.pyspark.python": "./env/bin/python"}}, None, "./env/bin/python"),
    ],
)
def test_workers_run_the_python_that_is_named_and_never_a_path_of_this_host_elsewhere(
    monkeypatch, master, configured, variable, python
):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", variable)
    env = {"WEIR_SPARK__MASTER": master}
    if "python" in configured:
        env["WEIR_SPARK__PYTHON"] = configured["python"]
    if "conf" in configured:
        env["WEIR_SPARK__CONF"] = json.dumps(configured["conf"])
    assert spark_session.worker_python(settings.load(env)) == ({"PYSPARK_PYTHON": python} if python else {})
