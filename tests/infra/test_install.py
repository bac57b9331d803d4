"""The installation of `make demo` and `make venv`: what it says comes, and that it is never silent for long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from infra import install
from weir.settings.configuration import PROJECT

PROGRAM = """
import os, sys
print("Downloading pyarrow (52.5MiB)", "Downloading numpy (16.1MiB)", " Downloaded numpy", sep="\\n", flush=True)
open(sys.argv[1]).read()  # until somebody has written
print(" + numpy==2.4.1", "Installed 2 packages in 3ms", sep="\\n")
sys.exit(3)
"""


def locked(lock: str) -> list[Requirement]:
    """The packages of a lock file that are for this machine."""
    lines = re.findall(r"^(\S+==[^\\\n]+)", (PROJECT / lock).read_text(), re.MULTILINE)
    packages = [Requirement(line.strip()) for line in lines]
    return [package for package in packages if package.marker is None or package.marker.evaluate()]


@pytest.mark.parametrize("lock", install.SIZES)
def test_the_packages_take_what_is_said(lock):
    names = [package.name for package in locked(lock)]
    assert len(names) > 100
    taken = sum(file.size or 0 for name in names for file in metadata.distribution(name).files or ())
    assert float(install.SIZES[lock].installed.split()[0]) == pytest.approx(taken / 1e9, rel=0.1)


def test_the_pages_name_the_same_sizes():
    demo, everything = (install.SIZES[lock] for lock in ("requirements-demo.lock", "requirements.lock"))
    readme, contributing = (" ".join((PROJECT / page).read_text().split()) for page in ("README.md", "CONTRIBUTING.md"))
    assert (
        f"`make demo` installs {demo.installed} of packages into `.venv`, of which at most {demo.downloads} are downloads."
        in readme
    )
    assert (
        f"`make demo` and `make ui` install {demo.installed} of packages ({demo.downloads} of downloads), `make venv` "
        f"and `make test` all of them, {everything.installed} ({everything.downloads})." in contributing
    )
    assert f"Spark's classes are archived, {install.ARCHIVE}," in contributing
    made = (PROJECT / "template" / "Makefile.jinja").read_text()
    assert float(everything.installed.split()[0]) == pytest.approx(2, rel=0.2) and "about 2 GB" in made
    assert install.ARCHIVE in made
    assert not re.search(r"\d [GM]B", (PROJECT / "Makefile").read_text()), "infra/install.py says them"


def test_what_the_demo_installs_runs_the_test_that_the_readme_shows():
    demo = {package.name for package in locked("requirements-demo.lock")}
    assert {"pytest", "pytest-timeout"} <= demo  # pyproject.toml sets a timeout, which pytest alone does not know
    assert "pytest tests/test_visits.py" in (PROJECT / "README.md").read_text()
    lacking = {package.name for package in locked("requirements.lock")} - demo
    imported = [name for name, of in metadata.packages_distributions().items() if set(of) <= lacking]
    assert "hypothesis" in imported
    code = f"import sys\nsys.modules |= dict.fromkeys({imported}, None)\n"
    code += "import importlib.util as util\nfind = util.find_spec\n"
    code += f"util.find_spec = lambda name, package=None: None if name in {imported} else find(name, package)\n"
    code += "import pytest\nsys.exit(pytest.main(['-p', 'pytest_timeout', 'tests/test_readme.py', '-k', 'readmes_pipeline']))"
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_waited_for_is_said_while_a_program_is_silent(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(install, "QUIET_SECONDS", 0.3)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def so_far() -> str:
        said.append("12 MB")
        if len(said) == 2:
            pipe.write_text("go on")
        return said[-1]

    said: list[str] = []
    code = install.follow([sys.executable, "-c", PROGRAM, str(pipe)], os.environ, so_far)
    printed = capfd.readouterr().out
    assert code == 3 and len(said) >= 2
    assert "s: waiting for pyarrow (52.5MiB); 12 MB" in printed and "waiting for numpy" not in printed
    assert "Installed 2 packages" in printed and "+ numpy" not in printed


def test_a_cache_that_cannot_be_written_is_replaced_by_one_in_the_project(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(install, "PROJECT", tmp_path)
    uv = PROJECT / ".venv" / "bin" / "uv"
    if not uv.exists():
        pytest.skip("uv is not in .venv")
    blocked = tmp_path / "file"
    blocked.touch()
    cache = install.uv_cache(uv, {**os.environ, "UV_CACHE_DIR": str(blocked / "cache")})
    assert cache == tmp_path / ".weir" / "cache" / "uv" and str(blocked) in capfd.readouterr().out
    assert install.uv_cache(uv, {**os.environ, "UV_CACHE_DIR": str(tmp_path / "own")}) == tmp_path / "own"


def test_a_projects_own_packages_are_installed_beside_weirs(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "PROJECT", tmp_path)
    assert [command[2] for command in install.commands("requirements.lock", "uv")] == ["sync", "install"]
    (tmp_path / "requirements.txt").touch()
    assert install.commands("requirements.lock", "uv")[-1][3:] == ["-r", "requirements.txt", "-c", "requirements.lock"]
