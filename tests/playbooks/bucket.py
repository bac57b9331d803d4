"""A bucket of moto's S3 server behind a door that can be shut: then connections are refused, and what the bucket holds
stays."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.storage.conftest import s3_client, serving

KEY, SECRET = "WEIR_KEY", "WEIR_SECRET"


@dataclass
class Door:
    """A port of 127.0.0.1 that leads to another one while it is open."""

    behind: int
    port: int = 0
    _listening: socket.socket | None = None
    _open: list[socket.socket] = field(default_factory=list)

    def open(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._welcome, args=(self._listening,), daemon=True).start()

    def shut(self) -> None:
        """Refuse from now on, and cut what is open."""
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # else the thread's accept() keeps it listening
            self._listening.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _welcome(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = listening.accept()
                host = socket.create_connection(("127.0.0.1", self.behind))
                self._open += [guest, host]
                threading.Thread(target=_carry, args=(guest, host), daemon=True).start()


def _carry(left: socket.socket, other: socket.socket) -> None:
    with left, other, contextlib.suppress(OSError, ValueError):
        while True:
            for ready in select.select([left, other], [], [])[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                (other if ready is left else left).sendall(data)


@dataclass
class Bucket:
    """`settings`: the storage section of a configuration whose root is in it."""

    name: str
    door: Door
    client: Any

    @property
    def settings(self) -> dict[str, Any]:
        s3 = {
            "endpoint": f"http://127.0.0.1:{self.door.port}",
            "region": "us-east-1",
            "allow_http": True,
            "access_key_id": {"env": KEY},
            "secret_access_key": {"env": SECRET},
            "request_timeout_seconds": 5,
            "max_attempts": 2,
        }
        return {"root": f"s3://{self.name}/weir", "s3": s3}

    def copy_to(self, folder: Path) -> None:
        """Every object below the root, past the door."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix="weir/")
        for stored in (listed for page in pages for listed in page.get("Contents", ())):
            path = folder / stored["Key"].removeprefix("weir/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.client.get_object(Bucket=self.name, Key=stored["Key"])["Body"].read())


@contextmanager
def bucket() -> Iterator[Bucket]:
    with serving("s3_server") as port:
        client = s3_client(port)
        bucket = Bucket(f"weir-{uuid.uuid4().hex[:12]}", Door(port), client)
        client.create_bucket(Bucket=bucket.name)
        bucket.door.open()
        try:
            yield bucket
        finally:
            bucket.door.shut()
