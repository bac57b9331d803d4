"""A cluster's answers about topics and the offsets of their partitions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from state_ops.errors import ConfigurationError, InputError, PipelineError, TransientError, WeirError
from weir.connectors.kafka.client import Client

Answers = TypeVar("Answers")
_RESTARTED_S = 0.5  # after which a broker that has just started knows what it leads
_IN_NAMES = str.maketrans("/+", "_-")  # base64 as it can stand in a file's name
Key = tuple[str, int]
"""A topic's name and a partition's number."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the brokers know it now.

    Attributes:
        id: Of this topic alone.
        partitions: Those that have a leader.
    """

    id: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offsets:
    """The offsets of a partition. From `low` to below `stable` can be read; all that is there is below `high`."""

    low: int
    stable: int
    high: int


class Cluster:
    """The topics of a source.

    Args:
        names: Those that it names.
        pattern: What the names of its topics match; None: it names them.
    """

    def __init__(self, client: Client, names: Sequence[str], pattern: str | None) -> None:
        self._client, self._names, self._pattern = client, tuple(names), pattern
        self._is_checked: set[str] = set()
        self._has_failed = False

    def described(self, names: Sequence[str] | None = None) -> dict[str, Topic]:
        """Topics by their names.

        Args:
            names: None: those of the source.
        """
        from confluent_kafka import TopicCollection

        is_pattern = names is None and self._pattern is not None
        wanted = self._matching() if is_pattern else list(names or self._names)
        if not wanted:
            return {}
        doing = "its topics cannot be looked at"
        futures = self._client.admin.describe_topics(TopicCollection(wanted), request_timeout=self._client.timeout_s)
        topics: dict[str, Topic] = {}
        for name, future in futures.items():
            try:
                topic = self._client.result(future, doing)
            except InputError as error:
                if is_pattern:
                    continue  # deleted just now
                if names is None:
                    raise InputError(
                        f"There is no topic {name}.",
                        where=self._client.where,
                        next="Create it, or correct the source's topics.",
                    ) from error
                continue
            topics[name] = Topic(
                str(topic.topic_id).translate(_IN_NAMES), tuple(sorted(partition.id for partition in topic.partitions))
            )
        return topics

    def _matching(self) -> list[str]:
        doing = "its topics cannot be listed"
        self._client.result(
            self._client.admin.describe_cluster(request_timeout=self._client.timeout_s), doing
        )  # notices a refused password at once
        try:
            listed = self._client.admin.list_topics(timeout=self._client.timeout_s).topics
        except self._client.kafka.KafkaException as error:
            raise self._client.failure(error.args[0], doing) from error
        matches = re.compile(str(self._pattern)).fullmatch
        return sorted(name for name in listed if matches(name) and not name.startswith("__"))

    def offsets(self, keys: Sequence[Key]) -> dict[Key, Offsets]:
        """Return the offsets of those partitions that can be reached."""
        from confluent_kafka.admin import OffsetSpec

        def ask() -> list[dict[Key, int]]:
            asked = (
                self._asked(keys, OffsetSpec.earliest(), False),
                self._asked(keys, OffsetSpec.latest(), True),
                self._asked(keys, OffsetSpec.latest(), False),
            )
            return [self._answers(futures) for futures in asked]

        lows, stables, highs = self._answered(ask)
        return {
            key: Offsets(lows[key], stables[key], highs[key])
            for key in keys
            if key in lows and key in stables and key in highs
        }

    def _answered(self, ask: Callable[[], Answers]) -> Answers:
        """Return the answers of partitions. If none answers, they are asked again by a new connection.

        If a partition does not answer, the next call is by a new connection in any case: an old one may go on to ask as
        if a partition's leader were what it was, for minutes, and by an epoch of that leader's which a broker that has
        just restarted does not know yet.
        """
        began = time.monotonic()
        try:
            return self._then_fresh(ask)
        except TransientError:
            if time.monotonic() - began > self._client.timeout_s / 2:
                raise
            time.sleep(_RESTARTED_S)
            return self._then_fresh(ask)

    def _then_fresh(self, ask: Callable[[], Answers]) -> Answers:
        self._has_failed = False
        try:
            return ask()
        finally:
            if self._has_failed:
                self._client.close()

    def listed_whole(self, keys: Sequence[Key], spec: Any) -> dict[Key, int]:
        """Return an offset of each partition, among what is committed. Raises TransientError if one cannot be
        reached."""
        deadline = time.monotonic() + self._client.timeout_s
        while True:
            offsets = self.listed(keys, spec, is_stable=True)
            missing = [key for key in keys if key not in offsets]
            if not missing:
                return offsets
            if time.monotonic() > deadline:
                raise TransientError(
                    f"The partition {title(missing[0])} cannot be reached.",
                    where=self._client.where,
                    next="See that the brokers are up and can be reached from here, and run again.",
                )
            time.sleep(0.05)  # of a topic that was created just now the broker may not have heard yet

    def listed(self, keys: Sequence[Key], spec: Any, is_stable: bool, what: str = "offset") -> dict[Key, int]:
        return self._answered(lambda: self._answers(self._asked(keys, spec, is_stable), what))

    def _asked(self, keys: Sequence[Key], spec: Any, is_stable: bool) -> Mapping[Any, Any]:
        from confluent_kafka import IsolationLevel, TopicPartition

        if not keys:
            return {}
        level = IsolationLevel.READ_COMMITTED if is_stable else IsolationLevel.READ_UNCOMMITTED
        return self._client.admin.list_offsets(
            {TopicPartition(*key): spec for key in keys}, isolation_level=level, request_timeout=self._client.timeout_s
        )

    def _answers(self, futures: Mapping[Any, Any], what: str = "offset") -> dict[Key, int]:
        """Return the answer of each partition that answers. Raises TransientError if none does."""
        answers: dict[Key, int] = {}
        failure: WeirError | None = None
        for partition, future in futures.items():
            try:
                answer = self._client.result(future, "its offsets cannot be read")
            except (TransientError, InputError) as error:
                failure, self._has_failed = error, True
                continue
            answers[partition.topic, partition.partition] = int(getattr(answer, what))
        if failure is not None and not answers:
            raise failure
        return answers

    def check_compaction(self, topics: Iterable[str]) -> None:
        """Refuse compacted topics, which do not give the same rows twice. Each topic is looked at once.

        Raises:
            PipelineError: A topic is compacted.
        """
        names = [name for name in topics if name not in self._is_checked]
        if not names:
            return
        from confluent_kafka.admin import ConfigResource, ResourceType

        asked = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        for resource, future in self._client.admin.describe_configs(
            asked, request_timeout=self._client.timeout_s
        ).items():
            with suppress(ConfigurationError):  # the user may not read it, and has to know
                settings = self._client.result(future, "its topics' settings cannot be read")
                policy = settings["cleanup.policy"].value or ""
                if "compact" in policy:
                    raise PipelineError(
                        f"The topic {resource.name} is compacted, so its messages cannot be read again as they were.",
                        where=self._client.where,
                        next="Say archive=True, which keeps what was read.",
                    )
            self._is_checked.add(resource.name)


def keys_of(topics: Mapping[str, Topic]) -> list[Key]:
    return [(name, partition) for name, topic in sorted(topics.items()) for partition in topic.partitions]


def title(key: Key) -> str:
    return f"{key[0]}-{key[1]}"
