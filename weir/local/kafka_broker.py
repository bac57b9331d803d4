"""A Kafka broker on this machine: one KRaft node in a directory, for the tests, for `make demo-kafka`, and to try
pipelines on:

    python -m weir.local.kafka_broker clicks results    until Ctrl-C: localhost:9092 with these topics, which stay

    with KafkaBroker(directory, cache_dir) as broker:
        broker.servers            "127.0.0.1:41873"
        broker.kill()             as a crash does; `start` brings it back with the same ports and data

The jars are those of `jars.lock`, fetched and checked as Spark's are. Every listener is on loopback. The broker ends
with the process that started it, whichever way that ends.

Listeners:
    PLAIN    clients without a password: `servers`
    SASL     clients with a user's name and password: `sasl_servers`
    PROXIED  tells clients to come back through `proxied_port`, where a test puts a proxy in front of `behind_proxy`
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from state_ops.errors import ConfigurationError, TransientError, WeirError
from weir.execution.spark.java import java_home
from weir.execution.spark.spark_jars import fetch, locked_jars
from weir.settings.configuration import PROJECT

_START_SECONDS = 60
_STOP_SECONDS = 30
_HOST = "127.0.0.1"

# The shell's standard input is a pipe from this process: when it closes, whoever closes it, Java is killed.
_WITH_PARENT = """\
exec 3<&0
"$@" </dev/null & java=$!
echo $java
(cat >/dev/null; kill -KILL $java) <&3 & watch=$!
wait $java
kill $watch
"""

_JAVA_OPTIONS = [
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
]

# What a broker of one node needs, and what makes it quick: one partition for each of its own topics, and no waiting
# for more members or for more to come.
_PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "num.partitions": "1",
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.ms": "-1",  # a message sent today may say a time years ago, and is kept
    "log.retention.check.interval.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "2097152",
    "log.segment.delete.delay.ms": "1000",
    "controller.quorum.election.timeout.ms": "200",
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "2000",  # one that was killed may register again only after that
}


class KafkaBroker:
    """One node, its ports and its directory; stopped until `start`.

    Args:
        directory: Where its data and its log will be; what is there is deleted by the first start.
        cache_dir: Where the jars are kept.
        users: Passwords by name, for the listener that asks for one.
        properties: More of the broker's settings, or other ones.
        port: Where clients without a password find it; by default a port that is free.
        keeps_data: Whether the first start goes on with what is in the directory.
    """

    def __init__(
        self,
        directory: Path,
        cache_dir: Path,
        *,
        users: Mapping[str, str] | None = None,
        properties: Mapping[str, str] | None = None,
        port: int | None = None,
        keeps_data: bool = False,
    ) -> None:
        self.directory = directory.absolute()
        self._cache_dir = cache_dir
        self._users, self._properties = dict(users or {"weir": "weir-secret"}), dict(properties or {})
        self._wanted_port, self._keeps_data = port, keeps_data
        self.port = self._controller_port = self.sasl_port = self.behind_proxy = self.proxied_port = 0
        self._was_up = False
        self._shell: subprocess.Popen[str] | None = None
        self._java_pid = 0

    @property
    def servers(self) -> str:
        return f"{_HOST}:{self.port}"

    @property
    def sasl_servers(self) -> str:
        return f"{_HOST}:{self.sasl_port}"

    @property
    def log(self) -> Path:
        """The file of the broker's log."""
        return self.directory / "broker.log"

    def __enter__(self) -> KafkaBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            TransientError: The jars cannot be fetched, or the broker does not come up; what it says is in the message.
        """
        jars = os.pathsep.join(map(str, fetch(locked_jars("kafka"), self._cache_dir)))
        java = [str(java_home(self._cache_dir) / "bin" / "java"), *_JAVA_OPTIONS, "-cp", jars]
        properties = self.directory / "server.properties"
        for attempts_left in (2, 1, 0):  # somebody else may have taken a port meanwhile
            if not self._was_up:
                self._prepare(java, properties)
            try:
                self._launch([*java, "kafka.Kafka", str(properties)])
                self._was_up = True
                return
            except TransientError:
                self.kill()
                if not attempts_left:
                    raise

    def _prepare(self, java: list[str], properties: Path) -> None:
        """Make a new directory, or take one that has data, and choose ports."""
        goes_on = self._keeps_data and (self.directory / "data" / "meta.properties").is_file()
        if not goes_on:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
        self.port, self._controller_port, self.sasl_port, self.behind_proxy, self.proxied_port = _free_ports(5)
        self.port = self._wanted_port or self.port
        properties.write_text("".join(f"{key}={value}\n" for key, value in self._settings().items()), "utf-8")
        if goes_on:
            return
        cluster = (
            f"w{base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]}"  # one with a dash first is an option
        )
        self._run([*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)])

    def _launch(self, command: list[str]) -> None:
        with self.log.open("a") as log:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _WITH_PARENT, "sh", *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._shell.stdout is not None
        self._java_pid = int(self._shell.stdout.readline())
        self._wait_until_it_answers()

    def stop(self) -> None:
        """End it in order: it says goodbye to its clients and closes its files."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does. Nothing happens if it does not run."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        """End it and delete its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _settings(self) -> dict[str, str]:
        listeners = {
            "PLAIN": (self.port, self.port),
            "SASL": (self.sasl_port, self.sasl_port),
            "PROXIED": (self.behind_proxy, self.proxied_port),
        }
        bound = [f"{name}://{_HOST}:{port}" for name, (port, _) in listeners.items()]
        users = " ".join(f'user_{name}="{password}"' for name, password in self._users.items())
        return {
            **_PROPERTIES,
            "log.dirs": str(self.directory / "data"),
            "controller.quorum.voters": f"1@{_HOST}:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join([*bound, f"CONTROLLER://{_HOST}:{self._controller_port}"]),
            "advertised.listeners": ",".join(f"{name}://{_HOST}:{port}" for name, (_, port) in listeners.items()),
            "inter.broker.listener.name": "PLAIN",
            "listener.security.protocol.map": (
                "PLAIN:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_PLAINTEXT"
            ),
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": (
                f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
            ),
            **self._properties,
        }

    def _run(self, command: list[str]) -> None:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_START_SECONDS,
        )  # fmt: skip
        if run.returncode != 0:
            raise self._failure("could not be prepared", run.stdout)

    def _wait_until_it_answers(self) -> None:
        assert self._shell is not None
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(self.port):
            if self._shell.poll() is not None:
                raise self._failure("ended while it started", self.log.read_text("utf-8", "replace"))
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure(f"did not answer within {_START_SECONDS} s", self.log.read_text("utf-8", "replace"))
            time.sleep(0.05)

    def _failure(self, what: str, output: str) -> TransientError:
        return TransientError(
            f"The Kafka broker {what}.",
            where=str(self.log),
            next=f"Look at the last of what it said: {output.strip()[-800:] or 'nothing'}",
        )

    def _end(self, how: signal.Signals) -> None:
        shell, self._shell = self._shell, None
        if shell is None:
            return
        if shell.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._java_pid, how)
            try:
                shell.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.kill(self._java_pid, signal.SIGKILL)
                shell.wait()
        for pipe in (shell.stdin, shell.stdout):
            assert pipe is not None
            pipe.close()


def _answers(port: int) -> bool:
    """Return whether a broker says which versions of its protocol it speaks (ApiVersions, version 0)."""
    request = struct.pack(">hhih", 18, 0, 1, -1)
    try:
        with socket.create_connection((_HOST, port), timeout=1) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            return len(connection.recv(8)) == 8
    except OSError:
        return False


def create_topics(servers: str, *names: str, partitions: int) -> None:
    """Create those of the topics that are not there. Needs the extra `kafka`."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    lacking = [name for name in names if name not in admin.list_topics(timeout=30).topics]
    if lacking:
        for created in admin.create_topics([NewTopic(name, partitions, 1) for name in lacking]).values():
            created.result(30)


def _check_free(port: int) -> None:
    with suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
        raise ConfigurationError(
            f"Something listens at port {port} already.",
            where=f"{_HOST}:{port}",
            next="If it is a broker, use it. Else say --port, and the same in the pipeline's params.",
        )


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def main(
    topics: Annotated[list[str], typer.Argument(help="Topics, created if they are not there.")],
    port: Annotated[int, typer.Option(help="Where clients find it.")] = 9092,
    partitions: Annotated[int, typer.Option(min=1, help="Of each topic that is created.")] = 3,
) -> None:
    """Run a Kafka broker on this machine until Ctrl-C. What its topics have stays below .weir/kafka."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    weir = PROJECT / ".weir"
    broker = KafkaBroker(weir / "kafka", weir / "cache", port=port, keeps_data=True)
    try:
        _check_free(port)
        broker.start()
        create_topics(broker.servers, *topics, partitions=partitions)
        typer.echo(f"A broker is up at localhost:{port}, with {', '.join(topics)}. Ctrl-C ends it; .weir/kafka stays.")
        signal.pause()
    except KeyboardInterrupt:
        broker.stop()
    except WeirError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    finally:
        broker.kill()


if __name__ == "__main__":
    typer.run(main)
