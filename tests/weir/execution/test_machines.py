"""A small pipeline with a real Spark on machines that lack something: a home, a name, rights, a plain path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.sampling import sampled
from tests.tools.servers import needs
from weir.settings.configuration import PROJECT

_CODE = """
import pyarrow as pa
from weir import Pipeline, agg, aggregate, delta, files

landed = files("{landing}/*.jsonl", format="json", schema=pa.schema([("k", pa.string()), ("n", pa.int64())]))
p = Pipeline("p", (aggregate("sums", landed, key="k", n=agg.sum("n"), sink=delta.append("sums")),))
"""
_SETTINGS = """
pipelines: {p: {object: 'cases.pipe:p', params: {landing: 'landing'}}}
storage: {root: '.weir/storage'}
spark: {master: 'local[1]', driver_memory: 1g}
"""
_ENVIRONMENT = PROJECT / ".venv" if (PROJECT / ".venv").is_dir() else Path(sys.prefix)
# The programs of the environment stay executable where they lie below /tmp themselves.
_NO_PROGRAMS = (
    'mount --rbind "$VENV" /mnt && mount --rbind /tmp /tmp && mount -o remount,bind,noexec,nosuid,nodev /tmp && '
    'case "$VENV" in /tmp/*) mount --bind /mnt "$VENV";; esac; cp /bin/true /tmp/$$ && ! /tmp/$$ 2>/dev/null && '
    'rm /tmp/$$ && exec "$@"'
)


@dataclass(frozen=True)
class Machine:
    """What a process of Weir's finds.

    Attributes:
        before: What the command stands behind.
        folder: The project's folder.
        landing: The file that lands.
        umask: The mask of files that it makes.
        home: The mode of the home directory; without one there is no home.
    """

    before: tuple[str, ...] = ()
    folder: str = "project"
    landing: str = "a.jsonl"
    umask: int = 0o022
    home: int | None = 0o755


_MACHINES = {
    "letters and blanks in paths": Machine(folder="Büro 100% #1 数", landing="données été+1.jsonl"),
    "no home": Machine(home=None),
    "a home that cannot be written, no root": Machine(
        before=("unshare", "-U", "--map-user=65534", "--map-group=65534"), home=0o555
    ),
    "files for their owner alone": Machine(umask=0o077),
    "a host name without an address": Machine(
        before=("unshare", "-U", "-r", "-u", "sh", "-c", 'hostname nowhere-7f3a && exec "$@"', "sh")
    ),
    "no programs in the temporary directory": Machine(
        before=("unshare", "-U", "-r", "-m", "sh", "-c", _NO_PROGRAMS, "sh")
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("name", sampled(_MACHINES, keep=1))
def test_a_pipeline_runs_and_goes_on_there(tmp_path: Path, name: str):
    machine = _MACHINES[name]
    if machine.before:
        needs("unshare", "util-linux")
    folder, home = tmp_path / machine.folder, tmp_path / "home"
    for part in ("configs", "cases", "landing"):
        (folder / part).mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "c"\nversion = "0"\n[tool.weir]\npackage = "cases"\n')
    (folder / "cases" / "__init__.py").touch()
    (folder / "cases" / "pipe.py").write_text(_CODE)
    (folder / "configs" / "dev.yaml").write_text(
        _SETTINGS + f"local: {{cache_dir: '{PROJECT / '.weir' / 'cache'}'}}\n", "utf-8"
    )
    home.mkdir(mode=0o755 if machine.home is None else machine.home)
    left_out = {"HOME", "WEIR_CONFIG", "WEIR_ENV", "TMPDIR"}
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    env |= {"PYTHONPATH": str(PROJECT), "VENV": str(_ENVIRONMENT)}
    env |= {} if machine.home is None else {"HOME": str(home)}

    def weir(*arguments: str) -> str:
        done = subprocess.run(
            [*machine.before, sys.executable, "-m", "weir.cli.main", *arguments],
            cwd=folder,
            env=env,
            umask=machine.umask,
            capture_output=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")
        return done.stdout.decode()

    for total in (3, 8):
        land = folder / "landing" / f"{total} {machine.landing}"
        land.write_text(f'{{"k": "é", "n": {total if total == 3 else 5}}}\n', "utf-8")
        weir("run", "p", "--until-caught-up")
        row = json.loads(weir("state", "scan", "p", "sums", "--json"))
        assert (row["k"], row["n"]) == ("é", total)
    assert "whole: 0 damaged" in weir("fsck", "p")
    assert not list(home.iterdir()), "Weir writes nothing into the home directory"
    if machine.umask == 0o077:
        made = (folder / ".weir").rglob("*")
        assert not [path for path in made if path.lstat().st_mode & 0o077 and not path.is_symlink()]
