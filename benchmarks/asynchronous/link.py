"""A link between clients and an S3 server: every request waits, all bytes of both directions share one rate.

    python -m benchmarks.asynchronous.link HOST PORT MB_PER_SECOND DELAY_MS ALTERNATE_SECONDS  0: without that

    client -> [request: head, delay, body by the bucket] -> server
    client <- [answer: bytes by the same bucket]         <- server

Prints its port, serves until its stdin ends, then prints its counters as JSON. Without limits it does the same work, so
that what it costs by itself is on both sides of a comparison. The head of a request is counted and waits; a body
follows at the link's rate, however many connections there are.

Alternating: the link begins without limits; after so many seconds it has them, after as many again it has not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

_CHUNK = 64 << 10
_LARGEST_HEAD = 1 << 20


@dataclass(slots=True)
class Counters:
    """What went over the link. requests: by method and by what is asked for, the directory two levels below the
    bucket's prefix, or a listing. busy: seconds that the bytes take at its rate; 0 without one. begun: seconds since
    1970 when the first stretch of an alternating link began."""

    requests: dict[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    busy: float = 0.0
    begun: float = 0.0


class Rate:
    """Bytes per second, shared by all connections: each chunk is sent when the chunks before it have had their time."""

    def __init__(self, bytes_per_second: float, counters: Counters, limited: Callable[[], bool]) -> None:
        self._rate, self._free, self._counters, self._limited = bytes_per_second, 0.0, counters, limited

    async def take(self, size: int) -> None:
        if not self._rate or not self._limited():
            return
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + size / self._rate
        self._counters.busy += size / self._rate
        await asyncio.sleep(self._free - now)


class Link:
    def __init__(self, host: str, port: int, bytes_per_second: float, delay: float, alternate: float) -> None:
        self._server, self._delay, self._alternate = (host, port), delay, alternate
        self.counters = Counters(begun=time.time())
        self._rate = Rate(bytes_per_second, self.counters, self._limited)

    async def connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection of a client, with one of its own to the server, until either ends."""
        server, to_server = await asyncio.open_connection(*self._server, limit=_LARGEST_HEAD)
        ways = [
            asyncio.create_task(self._requests(client, to_server)),
            asyncio.create_task(self._answers(server, to_client)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_server.close()
            to_client.close()

    async def _requests(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await client.readuntil(b"\r\n\r\n")
                kind = _kind(head.split(b"\r\n", 1)[0].decode())
                self.counters.requests[kind] = self.counters.requests.get(kind, 0) + 1
                if self._delay and self._limited():
                    await asyncio.sleep(self._delay)
                await self._up(head, to_server)
                fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:] if b":" in line)
                if b"chunked" in fields.get(b"transfer-encoding", b""):
                    await self._chunked(client, to_server)
                else:
                    await self._body(client, to_server, int(fields.get(b"content-length", b"0")))

    def _limited(self) -> bool:
        return not self._alternate or (time.time() - self.counters.begun) // self._alternate % 2 == 1

    async def _body(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, left: int) -> None:
        while left:
            chunk = await client.read(min(left, _CHUNK))
            if not chunk:
                raise ConnectionResetError
            left -= len(chunk)
            await self._up(chunk, to_server)

    async def _chunked(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        size = -1
        while size:
            line = await client.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            await self._up(line, to_server)
            await self._body(client, to_server, size + 2 if size else 0)
        while (line := await client.readuntil(b"\r\n")) != b"\r\n":  # trailers
            await self._up(line, to_server)
        await self._up(line, to_server)

    async def _up(self, chunk: bytes, to_server: asyncio.StreamWriter) -> None:
        self.counters.bytes_up += len(chunk)
        await self._rate.take(len(chunk))
        to_server.write(chunk)
        await to_server.drain()

    async def _answers(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await server.read(_CHUNK):
                self.counters.bytes_down += len(chunk)
                await self._rate.take(len(chunk))
                to_client.write(chunk)
                await to_client.drain()


def _kind(line: str) -> str:
    """`PUT /bucket/weir/pipeline/registry/... HTTP/1.1` is "PUT registry"."""
    method, target, _ = line.split(" ", 2)
    path, _, query = target.partition("?")
    if "list-type=2" in query:
        return "list"
    parts = path.split("/")
    return f"{method} {parts[4] if len(parts) > 4 else ''}".strip()


async def main(host: str, port: str, megabytes: str, milliseconds: str, alternate: str) -> None:
    link = Link(host, int(port), float(megabytes) * 1e6, float(milliseconds) / 1e3, float(alternate))
    listening = await asyncio.start_server(link.connect, "127.0.0.1", 0, limit=_LARGEST_HEAD)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(asdict(link.counters)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
