"""The command where its streams, its locale, its words, its settings or its rights are not what it is used to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra import flights_input
from state_ops.storage import disks
from tests.recovery.harness import Site
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

WEIR = str(Path(sys.executable).with_name("weir"))
# Root reads and writes everything, unless it gives that right away.
AS_ANYBODY = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--inh-caps=-all"] if os.getuid() == 0 else []
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    made = Site(tmp_path_factory.mktemp("environments"))
    made.land(flights_input.prepare(made.storage.parent / "days")[:1])
    list(run(made.pipeline, made.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    return made


def typed(site: Site, *words: str | bytes, shell: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Type a command; `shell` stands behind it, as redirections do."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | site.env | variables
    command = ["sh", "-c", f'"$@" {shell}', "sh", WEIR, *words] if shell else [WEIR, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=120, check=False)


@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_takes_nothing_and_fails_nothing(site, shell):
    done = typed(site, "status", "flights", shell=shell)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a disk without room")
@pytest.mark.parametrize("words", [("status", "flights"), ("status", "flights", "--json"), ("schema", "status"),
    ("--help",), ("metrics", "--once"), ("checkpoints", "flights"), ("state", "scan", "flights", "aircraft_rotation", "--json"),
    ("state", "scan", "flights", "aircraft_rotation", "--format", "arrow", "--output", "-")])  # fmt: skip
def test_a_full_standard_output_is_named_and_not_the_disk_of_the_storage(site, words):
    done = typed(site, *words, shell=">/dev/full")
    assert done.returncode == 1
    assert "error: The standard output does not take what the command says: No space left on device." in done.stderr
    assert "where: standard output, /dev/full" in done.stderr
    assert str(site.storage) not in done.stderr and "Traceback" not in done.stderr
    logged = typed(site, *words, shell=">/dev/full", WEIR_LOGGING__FORMAT="json")
    assert json.loads(logged.stderr.splitlines()[-1])["where"] == "standard output, /dev/full"


@pytest.mark.parametrize("words", [("schema", "status"), ("state", "scan", "flights", "aircraft_rotation", "--json")])
def test_a_reader_that_has_seen_enough_is_no_error(site, words):
    done = typed(site, *words, shell="| true")
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_character_that_a_stream_lacks_is_shown_by_its_number(site, encoding):
    query = "SELECT 'é漢' AS word"
    shown = typed(site, "state", "sql", "flights", query, PYTHONIOENCODING=encoding)
    assert shown.returncode == 0, shown.stderr
    assert "\\u6f22" in shown.stdout
    for_programs = typed(site, "state", "sql", "flights", query, "--json", PYTHONIOENCODING=encoding)
    assert json.loads(for_programs.stdout) == {"word": "é漢"}


def test_words_are_texts_in_a_locale_that_knows_ascii_alone(site):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = typed(site, "state", "sql", "flights", "SELECT 'é漢' AS word", "--json", **locale)
    assert json.loads(done.stdout) == {"word": "é漢"}


@pytest.mark.parametrize(
    "words",
    [
        ("state", "get", "flights", "tails", "--key", b"\xff"),
        ("state", "sql", "flights", b"SELECT '\xff'"),
        ("explain", "flights", "tails", "--row", b"tailnum = '\xff'"),
    ],
)
def test_words_that_are_no_text_are_refused(site, words):
    done = typed(site, *words)
    assert done.returncode == 2
    assert "is not UTF-8" in done.stderr


def test_a_folder_that_has_been_deleted_is_said_to_be_that(site, tmp_path):
    shell = f'mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", WEIR, "status", "flights"], env=os.environ | site.env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "has been deleted" in done.stderr and "Traceback" not in done.stderr


def test_an_empty_storage_root_is_refused_and_is_not_the_folder_at_hand(site):
    done = typed(site, "status", "flights", WEIR_STORAGE__ROOT="")
    assert done.returncode == 2
    assert "storage.root" in done.stderr


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_settings_that_cannot_be_read_are_named(site, tmp_path, content):
    file = tmp_path / "own.yaml"
    if content is not None:
        file.write_bytes(content)
    done = typed(site, "status", "flights", WEIR_CONFIG=str(file))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(file) in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEIR_CONNECTIONS__DB", "letmein-4711"),
        ("WEIR_CONNECTIONS__DB__OPTIONS__PASSWORD", "{env: [letmein-4711]}"),
        ("WEIR_CONNECTIONS", "letmein-4711"),
        ("WEIR_STORAGE__S3", "letmein-4711"),
        ("WEIR_SPARK__CONF", "{spark.acme.password: [letmein-4711]}"),
    ],
)
def test_a_wrong_setting_that_may_be_a_secret_is_not_repeated(site, variable, value):
    done = typed(site, "status", "flights", **{variable: value})
    assert done.returncode == 2
    assert variable in done.stderr
    assert "letmein" not in done.stderr


def test_a_directory_without_rights_says_nothing_about_its_disk(tmp_path):
    if AS_ANYBODY and shutil.which("setpriv") is None:
        pytest.skip("setpriv lets root try what others may not")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    code = f"from state_ops.storage import disks; disks.has_links({str(closed)!r})"
    done = subprocess.run([*AS_ANYBODY, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    assert disks.has_links(tmp_path)


def test_storage_without_the_right_to_write_says_who_needs_it(site):
    if AS_ANYBODY and shutil.which("setpriv") is None:
        pytest.skip("setpriv lets root try what others may not")
    directories = [path for path in (site.storage, *site.storage.rglob("*")) if path.is_dir()]
    for path in directories:
        path.chmod(0o555)
    try:
        env = os.environ | site.env
        for words in (["run", "flights", "--until-caught-up"], ["state", "scan", "flights", "tails"]):
            done = subprocess.run(
                [*AS_ANYBODY, WEIR, *words], env=env, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 1
            assert "ermission denied" in done.stderr
            assert f"uid {os.getuid()}" in done.stderr
            assert "hard links" not in done.stderr
    finally:
        for path in directories:
            path.chmod(0o755)
