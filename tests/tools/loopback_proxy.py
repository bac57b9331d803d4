"""What proxies on loopback share that stand in front of a server and lose some of what they pass on."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"


class LoopbackProxy(ABC):
    """`with` it, clients reach the server at `port`.

    Args:
        behind: The server's port.
        port: The proxy's own; 0: any that is free.
    """

    def __init__(self, behind: int, port: int = 0) -> None:
        self._behind = behind
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server((HOST, port))
        self.port = self._server.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in [self._server, *self._sockets]:
            cut(open_socket)

    @abstractmethod
    def passed_on(self, client: socket.socket, server: socket.socket) -> None:
        """Pass on what both sides of a new connection say, until one of them is cut."""

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection((HOST, self._behind), 10)
        except OSError:
            cut(client)
            return
        server.settimeout(None)
        self._sockets += [client, server]
        self.passed_on(client, server)


def received(source: socket.socket, count: int) -> bytes | None:
    """Return so many bytes; None if the other side has hung up before."""
    data = b""
    while len(data) < count:
        piece = source.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return data


def cut(connection: socket.socket) -> None:
    """Close a socket for both sides, whatever state it is in."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()
