"""A sink's topic as the brokers describe it, and whether the user may write to it."""

from __future__ import annotations

from typing import Any

from state_ops.errors import ConfigurationError, InputError
from weir.connectors.kafka.client import GRANT, Client


def described(client: Client, topic: str, *, rights: bool = False) -> Any:
    """Return what the brokers say of a topic; None if there is none.

    Args:
        rights: Whether they say what the user may do to it.
    """
    from confluent_kafka import TopicCollection

    future = client.admin.describe_topics(
        TopicCollection([topic]), include_authorized_operations=rights, request_timeout=client.timeout_s
    )[topic]
    try:
        return client.result(future, f"the topic {topic} cannot be looked at")
    except InputError:
        return None


def check_right(described: Any, topic: str, where: str) -> None:
    """Check that the user may write to a topic, since after a commit its rows have to go there.

    Args:
        described: What `described` returned, with rights.
        where: Of the sink, for errors.

    Raises:
        ConfigurationError: The user may not.
    """
    from confluent_kafka.admin import AclOperation

    may = described.authorized_operations if described is not None else None
    if may and AclOperation.WRITE not in may:  # brokers that do not say it are asked by the publish
        raise ConfigurationError(
            f"This user may not write to the topic {topic}.",
            where=where,
            next=GRANT,
        )
