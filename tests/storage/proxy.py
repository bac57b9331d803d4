"""An HTTP server in front of another one, which passes requests on or misbehaves as a test says."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked: method, path with the query, headers in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path

    @property
    def part(self) -> bool:
        """One part of an upload in parts."""
        return self.method == "PUT" and "uploadId=" in self.path

    def at(self, text: str) -> bool:
        return text in unquote(self.path)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)


def refused(status: int, code: str, message: str = "as the test wants") -> Answer:
    return Answer(status, {"content-type": "application/xml"}, ERROR.format(code, message).encode())


_SIGNATURE = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SignatureDoesNotMatch</Code><Message>The request signature we calculated does not match the signature you provided. \
Check your key and signing method.</Message><AWSAccessKeyId>{key}</AWSAccessKeyId><StringToSign>{signed}</StringToSign>\
<SignatureProvided>{signature}</SignatureProvided><StringToSignBytes>{signed_bytes}</StringToSignBytes>\
<CanonicalRequest>{canonical}</CanonicalRequest><CanonicalRequestBytes>{canonical_bytes}</CanonicalRequestBytes>\
<RequestId>4442587FB7D0A2F9</RequestId></Error>"""


def echoed(request: Request) -> Answer:
    """How AWS refuses a signature: with the key's id, and with all that it has signed itself, the request's headers
    among it."""
    authorization = request.headers.get("authorization", "")
    _, _, credential = authorization.partition("Credential=")
    key, _, scope = credential.partition(",")[0].partition("/")
    path, _, query = request.path.partition("?")
    headers = "\n".join(f"{name}:{value}" for name, value in sorted(request.headers.items()))
    canonical = f"{request.method}\n{path}\n{query}\n{headers}\n"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signed = f"AWS4-HMAC-SHA256\n{request.headers.get('x-amz-date', '')}\n{scope}\n{digest}"
    body = _SIGNATURE.format(
        key=key,
        signed=signed,
        signature=authorization.rpartition("Signature=")[2],
        signed_bytes=signed.encode().hex(" "),
        canonical=canonical,
        canonical_bytes=canonical.encode().hex(" "),
    )
    return Answer(403, {"content-type": "application/xml"}, body.encode())


@dataclass(frozen=True)
class Lost:
    """The request is carried out, and its answer is lost: this one comes instead."""

    answer: Answer


@dataclass(frozen=True)
class Hang:
    """No answer, until the test ends."""


@dataclass(frozen=True)
class Reset:
    """The connection is cut."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The answer says how long it is, and ends after half of it."""


Behaviour = Callable[[Request], Answer | Lost | Hang | Reset | Cut | Request | None]


class Proxy:
    """`with Proxy(port) as proxy:`; proxy.behave: for each request an answer, a changed request, a fault, or None to
    pass it on."""

    def __init__(self, port: int) -> None:
        self.behave: Behaviour = lambda _: None
        self.requests: list[Request] = []
        self.over = threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                outer._handle(self, port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def seen(self, what: Callable[[Request], bool]) -> int:
        with self._lock:
            return sum(1 for request in self.requests if what(request))

    def _handle(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        length = int(handler.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = Request(handler.command, handler.path, headers, handler.rfile.read(length))
        with self._lock:
            self.requests.append(request)
        decided = self.behave(request)
        if isinstance(decided, Hang):
            self.over.wait(60)
            handler.close_connection = True
            return
        if isinstance(decided, Reset):
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.shutdown(socket.SHUT_RD)
            handler.connection.close()
            handler.close_connection = True
            return
        if isinstance(decided, Lost):
            _forward(request, port)
            decided = decided.answer
        answer = (
            decided
            if isinstance(decided, Answer)
            else _forward(decided if isinstance(decided, Request) else request, port)
        )
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        if "content-length" not in answer.headers:
            handler.send_header("content-length", str(len(answer.body)))
        handler.end_headers()
        if request.method != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client has given up
                handler.wfile.write(answer.body[: len(answer.body) // 2] if isinstance(decided, Cut) else answer.body)
        if isinstance(decided, Cut):
            handler.close_connection = True


def _forward(request: Request, port: int) -> Answer:
    upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.endheaders(request.body)
        response = upstream.getresponse()
        body = response.read()
        dropped = ("connection", "transfer-encoding", "date", "server", "keep-alive")
        headers = {name.lower(): value for name, value in response.getheaders() if name.lower() not in dropped}
        if request.method != "HEAD":
            headers["content-length"] = str(len(body))
        return Answer(response.status, headers, body)
    finally:
        upstream.close()


def _without_condition(request: Request) -> Request:
    return replace(request, headers={name: value for name, value in request.headers.items() if name != "if-none-match"})


def _a_fifth(chance: random.Random) -> Behaviour:
    """By chance: a fixed number could fall in step with somebody's retries, and refuse the same request each time."""
    return lambda _: refused(503, "SlowDown") if chance.random() < 0.2 else None


def _to_first_put(
    decided: Answer | Lost, conditional: bool = False, by: Callable[[str], str] = lambda place: place
) -> Behaviour:
    """To the first put of each object, or the first that has a condition. by: what counts as one object."""
    seen: set[str] = set()
    lock = threading.Lock()

    def behave(request: Request) -> Answer | Lost | None:
        with lock:
            place = by(request.path.partition("?")[0])
            if request.method != "PUT" or place in seen or (conditional and "if-none-match" not in request.headers):
                return None
            seen.add(place)
            return decided

    return behave


def _no_cleaning(request: Request) -> Answer | None:
    """Listings of what may be deleted fail; those of Delta's logs and of probes work."""
    cleaned = ("prefix=root/flights/state/", "prefix=root/flights/registry/checkpoints/&")
    return (
        refused(503, "SlowDown")
        if request.listing and any(map(f"{request.path}&".__contains__, map(quote_prefix, cleaned)))
        else None
    )


def quote_prefix(text: str) -> str:
    return text.replace("/", "%2F")


def _slow_state(request: Request) -> None:
    """Objects of state come one after the other, and each takes its time."""
    if request.method == "GET" and not request.listing and request.at("/state/"):
        time.sleep(1.2)


BEHAVIOURS: dict[str, Behaviour] = {
    "brings state slowly": _slow_state,
    "ignores If-None-Match": _without_condition,
    "has every version already": lambda request: (
        refused(412, "PreconditionFailed")
        if "if-none-match" in request.headers and request.at("registry/checkpoints/_delta_log")
        else None
    ),
    "refuses everything": lambda _: refused(403, "AccessDenied"),
    "repeats what was signed": echoed,
    "repeats what was signed, to who writes": lambda request: echoed(request) if request.method == "PUT" else None,
    "repeats what was signed, to who reads rows": lambda request: (
        echoed(request)
        if request.method == "GET"
        and (request.at("/tables/") or request.at("registry/restores/part-"))
        and request.path.partition("?")[0].endswith(".parquet")
        else None
    ),
    "is busy with each object at first": _to_first_put(refused(409, "ConditionalRequestConflict")),
    "is busy with the first file of each kind": _to_first_put(
        refused(409, "ConditionalRequestConflict"), by=lambda place: place.rpartition(".")[2]
    ),
    "loses its answer to the first claim of each object": _to_first_put(
        Lost(refused(503, "SlowDown")), conditional=True
    ),
    "loses its answer to a take-over": lambda request: (
        Lost(refused(503, "SlowDown"))
        if request.method == "PUT" and request.at("registry/checkpoints/_delta_log/00000000000000000002.json")
        else None
    ),
    "hangs": lambda _: Hang(),
    "throttles a fifth of the requests": _a_fifth(random.Random(5)),
    "refuses to list what may be deleted": _no_cleaning,
}

if __name__ == "__main__":
    # delta-rs holds Python's lock while it waits for some answers: what answers it must be another process.
    with Proxy(int(sys.argv[1])) as serving:
        serving.behave = BEHAVIOURS[sys.argv[2]]
        print(serving.port, flush=True)
        sys.stdin.read()
