"""A program that is missing skips a test here, and fails it in CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from infra.kafka_broker import KafkaBroker
from state_ops.errors import TransientError
from tests.tools import kafka
from tests.tools.servers import REQUIRED, needs


def test_a_program_is_found_on_the_path_and_in_its_own_place(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert needs(Path(sys.executable).name, "python3") == Path(sys.executable)
    for version in ("14", "15"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "ours").touch(mode=0o755)
    assert needs("ours", "ours", [f"{tmp_path}/*/bin"]) == tmp_path / "15" / "bin" / "ours"


def test_one_that_is_missing_skips_and_in_ci_fails(monkeypatch):
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt install no-such-package"):
        needs("no-such-program", "no-such-package")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        needs("no-such-program", "no-such-package")


def test_a_broker_whose_jars_cannot_be_had_skips_and_one_that_does_not_come_up_fails(monkeypatch):
    def raising(*_: object) -> NoReturn:
        raise TransientError("Nothing answers.", where="here", next="try again")

    monkeypatch.delenv(REQUIRED, raising=False)
    monkeypatch.setattr(kafka, "fetch", lambda *_: [])
    monkeypatch.setattr(KafkaBroker, "start", raising)
    with pytest.raises(TransientError), kafka.broker_of_tests():
        pass
    monkeypatch.setattr(kafka, "fetch", raising)
    with pytest.raises(pytest.skip.Exception, match="Nothing answers"), kafka.broker_of_tests():
        pass
