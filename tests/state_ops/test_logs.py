"""Log lines as JSON: each is one object, whoever logs it and whatever it says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from state_ops import logs
from weir.settings.configuration import PROJECT

_PROCESS = """
import logging, sys, threading, warnings
from state_ops import logs
from state_ops.logs import Logger

logs.adopt()
log = Logger("weir.run")
log.info("epoch", rows_in=3, stage_rows={"accounts": {"in": 3}}, seconds=0.25)
log.debug("nobody hears it")
log.warning("two\\nlines, Grüße, \\udcff", path="ключ/🐟", error=ValueError("x"))
try:
    raise RuntimeError("first\\nsecond")
except RuntimeError:
    log.exception("it failed")
logging.getLogger("somebody.else").warning("said %s", "so", extra={"rows": 7})
try:
    raise KeyError("ключ")
except KeyError:
    logging.getLogger("somebody.else").exception("it failed too")
warnings.warn("old\\nways", DeprecationWarning, stacklevel=1)
import structlog
structlog.get_logger("author.of.a.stage").info("mine", password_file="/etc/x")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
log.info("a secret", url="s3://u:geheimnis99@bucket/x", header="Authorization: Bearer abcdefgh12345678")
raise SystemError("the end\\nof it")
"""


def lines(text: str) -> list[dict[str, Any]]:
    """Each line as an object; none is anything else."""
    objects = [json.loads(line) for line in text.splitlines()]
    assert all({"timestamp", "level", "logger", "event"} <= fields.keys() for fields in objects)
    return objects


def test_all_that_a_process_logs_is_json_warnings_threads_and_what_ends_it_too():
    # The stream can write nothing beyond ASCII, as in a container without a locale.
    env = {**os.environ, logs.FORMAT: "json", "PYTHONIOENCODING": "ascii:strict", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-c", _PROCESS]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    epoch, two, failed, other, other_failed, warned, author, thread, secret, end = lines(done.stderr)
    assert (epoch["level"], epoch["logger"], epoch["event"]) == ("info", "weir.run", "epoch")
    assert (epoch["rows_in"], epoch["seconds"], epoch["stage_rows"]) == (3, 0.25, {"accounts": {"in": 3}})
    assert datetime.fromisoformat(epoch["timestamp"]).tzinfo is not None
    assert two["event"] == "two\nlines, Grüße, \udcff" and two["path"] == "ключ/🐟" and two["error"] == "x"
    assert failed["error"] == "RuntimeError" and failed["exception"].startswith("Traceback (most recent call last):\n")
    assert failed["level"] == "error" and failed["exception"].endswith("RuntimeError: first\nsecond")
    assert (other["logger"], other["event"], other["rows"]) == ("somebody.else", "said so", 7)
    assert "KeyError: 'ключ'" in other_failed["exception"]
    assert (warned["logger"], warned["event"], warned["category"]) == ("py.warnings", "old\nways", "DeprecationWarning")
    assert author["logger"] == "author.of.a.stage" and author["password_file"] == "/etc/x"
    assert thread["thread"] == "worker" and "ZeroDivisionError" in thread["exception"]
    assert "geheimnis99" not in json.dumps(secret) and "abcdefgh12345678" not in json.dumps(secret)
    assert end["level"] == "critical" and end["exception"].endswith("SystemError: the end\nof it")


def test_without_the_setting_a_process_of_somebody_elses_is_left_alone(monkeypatch):
    monkeypatch.delenv(logs.FORMAT, raising=False)
    hook, handlers = sys.excepthook, list(logging.getLogger().handlers)
    logs.adopt("console")
    assert sys.excepthook is hook and logging.getLogger().handlers == handlers and not logs.is_json()


def test_the_variable_comes_before_what_a_process_has_adopted_and_that_before_its_settings(monkeypatch, tmp_path):
    (tmp_path / "json.yaml").write_text("logging: {format: json}\n")
    monkeypatch.delenv(logs.FORMAT, raising=False)
    monkeypatch.setenv("WEIR_CONFIG", str(tmp_path / "json.yaml"))
    assert logs.is_json()
    monkeypatch.setattr(logs, "_adopted", ["console"])
    assert not logs.is_json()
    monkeypatch.setenv(logs.FORMAT, "json")
    assert logs.is_json()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        ({1, 2}, [1, 2]),
        ({"at": datetime(2026, 1, 2, tzinfo=UTC)}, {"at": "2026-01-02T00:00:00+00:00"}),
        ({5: (True, None, 2.5)}, {"5": [True, None, 2.5]}),
        (b"bytes", "b'bytes'"),
    ],
)
def test_any_value_becomes_one_that_json_has(value, expected):
    assert json.loads(logs.as_json({"value": value})) == {"value": expected}


def test_a_field_that_is_named_like_a_secret_is_left_out_whatever_it_holds():
    fields = {
        "password": "short",
        "options": {"sasl.password": b"x", "aws_secret_access_key": "y"},
        "password_file": "/etc/x",
        "next_token": "page 2",
        "token_count": 5,
    }
    assert json.loads(logs.as_json(fields)) == {
        **fields,
        "password": "***",
        "options": {"sasl.password": "***", "aws_secret_access_key": "***"},
    }


def test_a_field_of_an_event_takes_no_other_fields_place(monkeypatch):
    monkeypatch.setenv(logs.FORMAT, "json")
    record = logging.makeLogRecord({"name": "theirs", "levelname": "WARNING", "msg": "x", "level": 3, "event": "y"})
    (line,) = lines(logs.Lines().format(record))
    assert (line["level"], line["event"], line["level_"], line["event_"]) == ("warning", "x", 3, "y")
