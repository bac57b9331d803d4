"""Servers that the tests of connectors share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tools.kafka import KafkaTopics


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaTopics]:
    """A broker, started where a test asks for it, and what tests do to it. It runs again before each test that uses
    it."""
    from tests.tools.kafka import KafkaTopics, broker_of_tests

    with broker_of_tests() as broker:
        yield KafkaTopics(broker)
