"""A topic's ACLs or options refuse a sink: the right to write is looked for before the commit, all else is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from state_ops.errors import ConfigurationError, PipelineError, TransientError
from tests.tools.kafka import CACHE, KafkaTopics
from tests.tools.servers import missing
from weir.connectors.kafka.sink import KafkaSink
from weir.definition.sink import Publisher, SinkOpening
from weir.execution.spark.spark_jars import fetch, locked_jars
from weir.local.kafka_broker import KafkaBroker
from weir.testing.sink_contract import SCHEMA, given

ID = "weir/p/main/out"
ACLS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
SASL = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "weir",
    "sasl.password": "weir-secret",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaTopics]:
    """A broker that asks ACLs of the user `weir`, and of nobody else."""
    try:
        fetch(locked_jars("kafka"), CACHE)
    except TransientError as error:
        missing(str(error))
    broker = KafkaBroker(Path(tmp_path_factory.mktemp("guarded")) / "broker", CACHE, properties=ACLS)
    broker.start()
    try:
        yield KafkaTopics(broker)
    finally:
        broker.remove()


def acl(operation: AclOperation, kind: ResourceType, name: str, how: AclPermissionType) -> AclBinding:
    return AclBinding(kind, name, ResourcePatternType.LITERAL, "User:weir", "*", operation, how)


def allow(guarded: KafkaTopics, *bindings: AclBinding) -> None:
    for future in guarded.admin.create_acls(list(bindings)).values():
        future.result(30)


@pytest.fixture
def opened(guarded: KafkaTopics) -> Iterator[tuple[str, Publisher]]:
    """A topic with the rights that the how-to lists, and a publisher that has published checkpoint 1 to it."""
    topic, yes = guarded.create(), AclPermissionType.ALLOW
    of_topic = [AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.READ, AclOperation.DESCRIBE_CONFIGS]
    allow(guarded, *(acl(operation, ResourceType.TOPIC, topic, yes) for operation in of_topic))
    of_id = [AclOperation.WRITE, AclOperation.DESCRIBE]
    allow(guarded, *(acl(operation, ResourceType.TRANSACTIONAL_ID, f"{ID}/{topic}", yes) for operation in of_id))
    allow(guarded, acl(AclOperation.READ, ResourceType.GROUP, f"{ID}/{topic}", yes))
    definition = KafkaSink(name="out", topic=topic, servers=guarded.broker.sasl_servers)
    publisher = definition.open(SinkOpening(f"{ID}/{topic}", str, SASL, lambda: None))
    try:
        publisher.check(SCHEMA)
        publisher.prepare(SCHEMA)
        publisher.publish(None, 1, given(1))
        yield topic, publisher
    finally:
        publisher.close()


def test_a_right_to_write_that_was_revoked_is_found_before_the_commit_and_said_after_it(guarded, opened):
    topic, publisher = opened
    denied = acl(AclOperation.WRITE, ResourceType.TOPIC, topic, AclPermissionType.DENY)
    allow(guarded, denied)
    for step in (publisher.check, publisher.prepare):
        with pytest.raises(ConfigurationError, match=f"may not write to the topic {topic}"):
            step(SCHEMA)
    with pytest.raises(ConfigurationError, match=r"may not do that: .*authorization failed"):
        publisher.publish(1, 2, given(2))
    found = AclBindingFilter(
        ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:weir", "*", AclOperation.WRITE,
        AclPermissionType.DENY,
    )  # fmt: skip
    for future in guarded.admin.delete_acls([found]).values():
        future.result(30)
    publisher.prepare(SCHEMA)
    publisher.publish(1, 2, given(2))
    assert len(guarded.committed(topic)) == 2


@pytest.mark.parametrize(("option", "value"), [("cleanup.policy", "compact"), ("message.timestamp.before.max.ms", "1")])
def test_what_the_topics_options_refuse_after_the_commit_is_not_tried_again(guarded, opened, option, value):
    topic, publisher = opened
    change = ConfigEntry(option, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[change])
    for future in guarded.admin.incremental_alter_configs([resource]).values():
        future.result(30)
    with pytest.raises(PipelineError, match="the topic does not take it as it is") as refused:
        publisher.publish(1, 2, given(2))
    assert "cleanup.policy" in (refused.value.next or "")
    assert len(guarded.committed(topic)) == 1
