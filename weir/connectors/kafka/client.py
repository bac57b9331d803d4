"""A connection to Kafka: the options of its client, calls with a deadline, and errors that say what to do.

The client (librdkafka) tries again for ever, also where a password is refused, and says so only in callbacks. So each
call here waits in small steps, and ends as soon as a callback has said that waiting is in vain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from state_ops import extras
from state_ops.errors import ConfigurationError, InputError, PipelineError, TransientError, WeirError
from state_ops.redaction import redacted

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

Result = TypeVar("Result")

GRANT = "Give the user the right by Kafka's ACLs; the how-to lists those that are needed."
_TIMEOUT_OPTION = "socket.timeout.ms"
_STEP_S = 0.05
_SILENT = logging.Logger("weir.kafka", logging.CRITICAL + 1)
_SECRET = ("password", "secret", "token", "jaas", "ssl.key", "ssl.certificate.pem", "oauthbearer.config")
_PAGE = "docs/playbooks/kafka.md"


class Client:
    """One cluster, as a source or a sink reaches it.

    Args:
        who: The source or sink, for errors: "source clicks".
        servers: Addresses of brokers, with commas between them.
        options: Options of librdkafka, with secrets.
        patience: Seconds that a call may take, unless the options say `socket.timeout.ms`.

    Attributes:
        timeout_s: How long a call may take, and a broker be silent: the option `socket.timeout.ms`.
    """

    def __init__(self, who: str, servers: str, options: Mapping[str, str], patience: float = 30) -> None:
        with extras.needed_for("Kafka", who):
            import confluent_kafka
        self.kafka = confluent_kafka
        self.who, self.servers = who, servers
        self.timeout_s = _seconds(options.get(_TIMEOUT_OPTION), who, patience)
        self._options = dict(options)
        self._secrets = sorted(
            (value for name, value in options.items() if value and any(part in name for part in _SECRET)),
            key=len,
            reverse=True,
        )
        self._refusal: KafkaError | None = None
        self._trouble: KafkaError | None = None

    @property
    def where(self) -> str:
        return f"{self.who}, brokers {self.servers}"

    def configuration(self, **options: Any) -> dict[str, Any]:
        """Options for a client of the library. options: ours with `_` for `.`, which nobody may override."""
        return {
            "client.id": "weir",
            "logger": _SILENT,  # what goes wrong comes by the callback; this would go to standard error
            "reconnect.backoff.max.ms": 1000,
            "allow.auto.create.topics": False,
            **self._options,
            "bootstrap.servers": self.servers,
            "error_cb": self._heard,
            **{name.replace("_", "."): value for name, value in options.items()},
        }

    def opened(self, make: Callable[[dict[str, Any]], Result], **options: Any) -> Result:
        """Return a client of the library. Raises ConfigurationError for options that it does not take."""
        try:
            return make(self.configuration(**options))
        except (self.kafka.KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Kafka's client does not take an option: {self.hidden(_text(error))}",
                where=self.where,
                next="Correct connections.<name>.options; the names are librdkafka's.",
            ) from error

    @cached_property
    def admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        options = self.configuration()
        options.pop("allow.auto.create.topics")
        return self.opened(lambda _: AdminClient(options))

    def result(self, future: Future[Result], doing: str) -> Result:
        """Return the answer of an administrative call.

        Args:
            future: As the client library gives it.
            doing: What is done, as a clause: "its topics cannot be listed".
        """
        deadline = time.monotonic() + self.timeout_s + 1
        while not wait([future], _STEP_S).done:
            self.admin.poll(0)
            self.check(doing)
            if time.monotonic() > deadline:
                raise self.failure(self.kafka.KafkaError(self.kafka.KafkaError._TIMED_OUT), doing)
        self.admin.poll(0)
        try:
            answer = future.result()
        except self.kafka.KafkaException as error:
            raise self.failure(error.args[0], doing) from error
        self._trouble = None
        return answer

    def check(self, doing: str) -> None:
        """Raise ConfigurationError if a callback has said that the brokers refuse this client."""
        if self._refusal is not None:
            raise self.failure(self._refusal, doing)

    def failure(self, error: KafkaError, doing: str) -> WeirError:
        """Return a client's error as one of ours."""
        codes = self.kafka.KafkaError
        code = error.code()
        refusal = self._refusal
        if refusal is None and code in (codes._AUTHENTICATION, codes.SASL_AUTHENTICATION_FAILED, codes._SSL):
            refusal = error
        if refusal is not None:
            return ConfigurationError(
                f"{doing}: the brokers refuse the connection: {self.hidden(refusal.str())}",
                where=self.where,
                next="Correct user, password, mechanism and certificates below connections.<name>.options.",
            )
        if error.name().endswith("AUTHORIZATION_FAILED"):
            return ConfigurationError(
                f"{doing}: this user may not do that: {self.hidden(error.str())}",
                where=self.where,
                next=GRANT,
            )
        if code in (
            codes.UNKNOWN_TOPIC_OR_PART,
            codes._UNKNOWN_TOPIC,
            codes._UNKNOWN_PARTITION,
            codes.UNKNOWN_TOPIC_ID,
        ):
            return InputError(
                f"{doing}: there is no such topic or partition.", where=self.where, next="Correct the topic's name."
            )
        if code in (codes._INVALID_ARG, codes.INVALID_CONFIG, codes.TOPIC_EXCEPTION, codes.POLICY_VIOLATION,
                    codes.INVALID_PARTITIONS, codes.INVALID_REPLICATION_FACTOR):  # fmt: skip
            return ConfigurationError(
                f"{doing}: {self.hidden(error.str())}",
                where=self.where,
                next="Correct the options or the topic's name.",
            )
        if code in (codes.MSG_SIZE_TOO_LARGE, codes.RECORD_LIST_TOO_LARGE):
            return PipelineError(
                f"{doing}: a message is larger than the topic takes.",
                where=self.where,
                next="Make the rows smaller, or raise message.max.bytes of the connection and max.message.bytes of the "
                "topic.",
            )
        if code in (codes.INVALID_RECORD, codes.INVALID_TIMESTAMP):
            return PipelineError(
                f"{doing}: the topic does not take it as it is: {self.hidden(error.str())}",
                where=self.where,
                next="See the topic's options: a compacted one (cleanup.policy) takes no message without a key, and "
                "message.timestamp.before.max.ms and message.timestamp.after.max.ms bound times.",
            )
        reason = self.hidden((self._trouble or error).str())
        return TransientError(
            f"{doing}: {reason}",
            where=self.where,
            next=f"See that the brokers are up and can be reached from here, and run again: {_PAGE}.",
        )

    def hidden(self, text: str) -> str:
        """Return a text from outside, on one line and without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(redacted(text).split())

    def close(self) -> None:
        """Give back the connection for administrative calls; the next one makes another."""
        self.__dict__.pop("admin", None)

    def _heard(self, error: KafkaError) -> None:
        """Note an error that a client reports by itself, from within one of its calls."""
        codes = self.kafka.KafkaError
        if error.code() in (codes._AUTHENTICATION, codes._SSL, codes.SASL_AUTHENTICATION_FAILED):
            self._refusal = error
        elif error.code() in (codes._RESOLVE, codes._TRANSPORT):
            self._trouble = error


def _seconds(milliseconds: str | None, who: str, otherwise: float) -> float:
    try:
        return otherwise if milliseconds is None else max(0.1, int(milliseconds) / 1000)
    except ValueError as error:
        raise ConfigurationError(
            f"{_TIMEOUT_OPTION} is no number.", where=who, next="Correct connections.<name>.options."
        ) from error


def _text(error: BaseException) -> str:
    with suppress(AttributeError, IndexError):
        return str(error.args[0].str())
    return str(error)
