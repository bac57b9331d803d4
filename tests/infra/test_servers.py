"""A program that is missing skips a test here, and fails it in CI."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from state_ops.errors import TransientError
from tests.tools import kafka
from tests.tools.servers import REQUIRED, needs
from weir.local.kafka_broker import KafkaBroker
from weir.settings.configuration import PROJECT


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


def project(folder: Path) -> Path:
    """A folder that commands take for the project, with the jars that are here."""
    (folder / "pyproject.toml").write_text("[tool.weir]\n")
    (folder / ".weir").mkdir()
    (folder / ".weir" / "cache").symlink_to(kafka.CACHE)
    return folder


def starting(folder: Path, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weir.local.kafka_broker", "clicks", "--port", str(port), "--partitions", "1"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_broker_to_try_pipelines_on_leaves_a_port_that_is_taken_to_whoever_has_it(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, message = starting(project(tmp_path), port).communicate(timeout=60)
    assert f"Something listens at port {port} already." in message and "--port" in message
    assert not (tmp_path / ".weir" / "kafka").exists()


@pytest.mark.long
def test_a_broker_to_try_pipelines_on_has_its_messages_when_it_comes_back(tmp_path: Path):
    with kafka.broker_of_tests():  # or there are no jars, and this test is skipped
        pass
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    project(tmp_path)
    for messages in (1, 2):
        broker = starting(tmp_path, port)
        try:
            assert broker.stdout is not None and f"localhost:{port}, with clicks" in broker.stdout.readline()
            producer = Producer({"bootstrap.servers": f"localhost:{port}"})
            producer.produce("clicks", b"{}")
            assert producer.flush(30) == 0
            reader = Consumer({"bootstrap.servers": f"localhost:{port}", "group.id": "test"})
            assert reader.get_watermark_offsets(TopicPartition("clicks", 0), 30) == (0, messages)
            reader.close()
        finally:
            broker.send_signal(signal.SIGINT)
            assert broker.wait(60) == 0
