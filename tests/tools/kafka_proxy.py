"""A proxy on loopback between Kafka's clients and the broker that loses requests or answers of one kind."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.tools.loopback_proxy import HOST, LoopbackProxy, cut, received
from weir.local.kafka_broker import KafkaBroker

END_TRANSACTION = 26


class KafkaProxy(LoopbackProxy):
    """`with KafkaProxy(broker) as proxy:` clients reach the broker by `proxy.servers`.

    Attributes:
        lost_answers: How many answers to requests of the kind `END_TRANSACTION` will be lost: the broker does as it is
            told, and the connection is cut instead of the answer.
        lost_requests: How many such requests will be lost before the broker sees them.
        lost: How many answers and requests have been lost.
    """

    def __init__(self, broker: KafkaBroker) -> None:
        super().__init__(broker.behind_proxy, broker.proxied_port)
        self.servers = f"{HOST}:{self.port}"
        self.lost_answers = self.lost_requests = self.lost = 0

    def passed_on(self, client: socket.socket, server: socket.socket) -> None:
        ends = set[int]()

        def is_lost_request(frame: bytes) -> bool:
            kind, _, number = struct.unpack_from(">hhi", frame)
            if kind != END_TRANSACTION:
                return False
            ends.add(number)
            return self._loses("lost_requests")

        def is_lost_answer(frame: bytes) -> bool:
            return struct.unpack_from(">i", frame)[0] in ends and self._loses("lost_answers")

        threading.Thread(target=_pump, args=(client, server, is_lost_request), daemon=True).start()
        _pump(server, client, is_lost_answer)

    def _loses(self, which: str) -> bool:
        with self._lock:
            left = getattr(self, which)
            if left > 0:
                setattr(self, which, left - 1)
                self.lost += 1
            return left > 0


def _pump(source: socket.socket, target: socket.socket, is_lost: Callable[[bytes], bool]) -> None:
    """Passes frames on until one is lost or a side hangs up; then both connections are cut."""
    with suppress(OSError):
        while (size := received(source, 4)) is not None:
            frame = received(source, struct.unpack(">i", size)[0])
            if frame is None or is_lost(frame):
                break
            target.sendall(size + frame)
    cut(source)
    cut(target)
