"""A proxy on loopback in front of a Postgres server that cuts connections at their COMMIT."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from tests.tools.loopback_proxy import LoopbackProxy, cut, received

BEFORE, AFTER, AT_ONCE, SILENT = "before", "after", "at once", "silent"
_REQUESTS = (80877103, 80877104)  # for TLS and GSS, before the first message


class PostgresProxy(LoopbackProxy):
    """`with PostgresProxy(port) as proxy:` clients reach the server at `proxy.port`.

    Attributes:
        lost: How many COMMITs will be lost.
        how: BEFORE: the server never sees it and the connection is cut. AFTER: the server has done it, and the
            connection is cut instead of the answer. AT_ONCE: the client is cut off as soon as the server has been sent
            it. SILENT: the client is cut off and the server never hears of that.
        seen: How many have been lost.
    """

    def __init__(self, port: int, how: str, lost: int = 1) -> None:
        super().__init__(port)
        self.how, self.lost, self.seen = how, lost, 0

    def passed_on(self, client: socket.socket, server: socket.socket) -> None:
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        eaten = threading.Event()
        threading.Thread(target=_answers, args=(server, client, eaten), daemon=True).start()
        with suppress(OSError):
            if self._requests(client, server, eaten):
                return
        cut(client)
        cut(server)

    def _requests(self, client: socket.socket, server: socket.socket, eaten: threading.Event) -> bool:
        """Pass messages on; returns whether the server is to hear nothing of the end."""
        is_first, is_commit = True, False
        while True:
            kind = b"" if is_first else received(client, 1)
            size = received(client, 4)
            if kind is None or size is None:
                return False
            body = received(client, struct.unpack(">i", size)[0] - 4) or b""
            if is_first:
                is_first = struct.unpack_from(">i", body)[0] in _REQUESTS
            elif kind == b"P":
                is_commit = body.startswith(b"\0COMMIT\0")
                if is_commit and self.how in (BEFORE, SILENT) and self._loses():
                    cut(client)
                    return self.how == SILENT
            elif kind == b"B" and is_commit and self._loses():
                eaten.set()
                server.sendall(kind + size + body)
                for _ in range(3):  # describe, execute, sync
                    kind, size = received(client, 1), received(client, 4)
                    assert kind is not None and size is not None
                    server.sendall(kind + size + (received(client, struct.unpack(">i", size)[0] - 4) or b""))
                if self.how == AT_ONCE:
                    cut(client)
                received(client, 1)  # until its answer was there, which cuts the client off
                return False
            server.sendall(kind + size + body)

    def _loses(self) -> bool:
        with self._lock:
            if self.seen >= self.lost:
                return False
            self.seen += 1
            return True


def _answers(server: socket.socket, client: socket.socket, eaten: threading.Event) -> None:
    with suppress(OSError):
        while piece := server.recv(65536):
            if eaten.is_set():
                break
            client.sendall(piece)
    cut(client)
