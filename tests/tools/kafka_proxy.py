"""A proxy on loopback between Kafka's clients and the broker that loses requests or answers of one kind."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from infra.kafka_broker import KafkaBroker

END_TRANSACTION = 26
_HOST = "127.0.0.1"


class KafkaProxy:
    """`with KafkaProxy(broker) as proxy:` clients reach the broker by `proxy.servers`.

    Attributes:
        lost_answers: How many answers to requests of the kind `END_TRANSACTION` will be lost: the broker does as it is
            told, and the connection is cut instead of the answer.
        lost_requests: How many such requests will be lost before the broker sees them.
        lost: How many answers and requests have been lost.
    """

    def __init__(self, broker: KafkaBroker) -> None:
        self.servers = f"{_HOST}:{broker.proxied_port}"
        self.lost_answers = self.lost_requests = self.lost = 0
        self._port = broker.behind_proxy
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server((_HOST, broker.proxied_port))

    def __enter__(self) -> KafkaProxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in [self._server, *self._sockets]:
            _cut(open_socket)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            broker = socket.create_connection((_HOST, self._port), 10)
        except OSError:
            _cut(client)
            return
        self._sockets += [client, broker]
        broker.settimeout(None)
        ends = set[int]()

        def is_lost_request(frame: bytes) -> bool:
            kind, _, number = struct.unpack_from(">hhi", frame)
            if kind != END_TRANSACTION:
                return False
            ends.add(number)
            return self._loses("lost_requests")

        def is_lost_answer(frame: bytes) -> bool:
            return struct.unpack_from(">i", frame)[0] in ends and self._loses("lost_answers")

        threading.Thread(target=_pump, args=(client, broker, is_lost_request), daemon=True).start()
        _pump(broker, client, is_lost_answer)

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
        while (size := _received(source, 4)) is not None:
            frame = _received(source, struct.unpack(">i", size)[0])
            if frame is None or is_lost(frame):
                break
            target.sendall(size + frame)
    _cut(source)
    _cut(target)


def _received(source: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = source.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return data


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()
