"""S3 that throttles, hangs, cuts, refuses and lies about its listings; uploads whose process dies. A real server behind
a proxy that misbehaves, a real client in front of it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from state_ops.checkpoints.registry import Registry
from state_ops.errors import ConfigurationError
from state_ops.ids import Generation
from state_ops.storage.object_store import PART, translated
from state_ops.storage.storage import Storage, UnavailableError
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint
from tests.storage.conftest import Bucket
from tests.storage.proxy import Cut, Hang, Proxy, Request, Reset, refused
from tests.tools.sampling import sampled
from weir.settings.configuration import PROJECT

ATTEMPTS = 4
PATIENCE = 0.5  # seconds
SLOW_DOWN = refused(503, "SlowDown")


@pytest.fixture
def storage(bucket: Bucket, proxy: Proxy, quick_retries: None) -> Storage:
    """Through the proxy."""
    bucket.storage().put_bytes("there", b"content")
    return bucket.storage(proxy.port, max_attempts=ATTEMPTS)


@pytest.fixture
def hurried(bucket: Bucket, proxy: Proxy, storage: Storage) -> Storage:
    """The same, which tries twice and does not wait long."""
    return bucket.storage(proxy.port, max_attempts=2, request_timeout_seconds=PATIENCE)


def first(number: int, fault: object) -> Callable[[Request], object]:
    """The first requests fail, those after them work."""
    counter = itertools.count(1)
    return lambda _: fault if next(counter) <= number else None


OPERATIONS: dict[str, Callable[[Storage, Path], object]] = {
    "put_bytes": lambda storage, _: storage.put_bytes("new", b"x"),
    "put_file": lambda storage, local: storage.put_file(local, "new"),
    "get_file": lambda storage, local: storage.get_file("there", local),
    "read_bytes": lambda storage, _: storage.read_bytes("there"),
    "size": lambda storage, _: storage.size("there"),
    "list": lambda storage, _: list(storage.list()),
    "list_dirs": lambda storage, _: storage.list_dirs(""),
    "delete": lambda storage, _: storage.delete("there"),
    "delete_tree": lambda storage, _: storage.delete_tree("there"),
}
SINGLE = ["put_bytes", "put_file", "size", "delete"]  # one request, tried again by Weir alone


@pytest.fixture
def local(tmp_path: Path) -> Path:
    file = tmp_path / "local"
    file.write_bytes(b"a small file")
    return file


@pytest.mark.parametrize(
    ("operation", "fault"),
    sampled(
        itertools.product(OPERATIONS, [SLOW_DOWN, refused(500, "InternalError"), refused(429, "TooMany"), Reset()]),
        lambda case: case[0] == "put_bytes" or case[1] is SLOW_DOWN,
    ),
    ids=str,
)
def test_case_24_what_may_pass_is_tried_again(storage, proxy, local, operation, fault):
    proxy.behave = first(ATTEMPTS - 1, fault)
    OPERATIONS[operation](storage, local)
    assert len(proxy.requests) >= ATTEMPTS


@pytest.mark.parametrize("operation", SINGLE)
def test_tries_are_bounded(storage, proxy, local, operation):
    proxy.behave = lambda _: SLOW_DOWN
    with pytest.raises(UnavailableError, match="503"):
        OPERATIONS[operation](storage, local)
    assert len(proxy.requests) == ATTEMPTS


@pytest.mark.parametrize("operation", sampled(["list", "get_file", "read_bytes", "list_dirs", "delete_tree"], 2))
def test_tries_of_operations_with_many_requests_are_bounded_too(storage, proxy, local, operation):
    """Each request is tried again by the library, the operation by Weir."""
    proxy.behave = lambda _: SLOW_DOWN
    with pytest.raises(UnavailableError, match="503"):
        OPERATIONS[operation](storage, local)
    assert ATTEMPTS <= len(proxy.requests) <= ATTEMPTS * ATTEMPTS


@pytest.mark.parametrize("operation", sampled(["put_bytes", "size", "delete"]))
def test_a_store_that_hangs_is_given_up(hurried, proxy, local, operation):
    proxy.behave = lambda _: Hang()
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="no answer in time"):
        OPERATIONS[operation](hurried, local)
    assert len(proxy.requests) == 2
    assert time.monotonic() - started < 10 * PATIENCE


def test_one_answer_that_never_comes_is_asked_for_again(hurried, proxy):
    proxy.behave = first(1, Hang())
    assert hurried.read_bytes("there") == b"content"


def test_nobody_listens(bucket: Bucket, proxy: Proxy, quick_retries: None):
    storage = bucket.storage(1, max_attempts=3)
    with pytest.raises(UnavailableError, match="no connection"):
        storage.size("there")


def test_a_download_that_is_cut_is_whole_in_the_end(storage, proxy, bucket, tmp_path):
    content = os.urandom(3 << 20)
    bucket.storage().put_bytes("big", content)
    proxy.behave = first(2, Cut())
    storage.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    proxy.behave = lambda _: Cut()
    with pytest.raises(UnavailableError):
        storage.read_bytes("big")


BUSY = [refused(409, "OperationAborted"), refused(409, "ConditionalRequestConflict")]


@pytest.mark.parametrize("busy", sampled(BUSY), ids=str)
@pytest.mark.parametrize("operation", [*SINGLE, "create"])
def test_a_store_that_is_busy_with_an_object_is_asked_again(storage, proxy, bucket, local, operation, busy):
    """S3's 409 says nothing of what is there: only 412 does."""
    operations = {**OPERATIONS, "create": lambda storage, _: storage.create("new", b"x")}
    proxy.behave = first(ATTEMPTS - 1, busy)
    assert operations[operation](storage, local) is not False
    assert len(proxy.requests) >= ATTEMPTS
    assert ("root/flights/new" in bucket.objects()) is (operation not in ("size", "delete"))
    assert storage.create("new", b"y") is (operation in ("size", "delete"))
    proxy.behave = lambda _: busy
    with pytest.raises(UnavailableError, match="409"):
        operations[operation](storage, local)


@pytest.mark.parametrize(
    "way", sampled(["loses its answer to the first claim of each object", "is busy with each object at first"])
)
def test_a_take_over_through_a_store_that_is_busy_or_loses_answers_is_none_of_somebody_elses(
    bucket, misbehaving, quick_retries, way
):
    """The probe, the tables, the claims and a commit, each of which meets a 409 first, or its own entry."""
    for generation in (1, 2):
        storage = bucket.storage(misbehaving(way))
        registry = Registry(storage, APP)
        assert registry.take_over() == generation
        registry.commit(replace(a_checkpoint(generation, generation - 1 or None, []), generation=generation), [])
    assert [row.id for row in Registry(bucket.storage(), APP).checkpoints()] == [1, 2]


@pytest.mark.parametrize("attempts", sampled([1, 4]))
def test_a_take_over_that_landed_although_an_error_was_reported_is_ours(bucket, misbehaving, quick_retries, attempts):
    """With more attempts delta-rs puts it again and meets its own entry; with one the error comes through."""
    Registry(bucket.storage(), APP).take_over()
    registry = Registry(bucket.storage(misbehaving("loses its answer to a take-over"), max_attempts=attempts), APP)
    assert registry.take_over() == 2
    registry.prove(Generation(2))
    assert Registry(bucket.storage(), APP).generation() == 2


REFUSALS = [
    (refused(403, "AccessDenied"), PermissionError, "403 AccessDenied"),
    (refused(401, "Unauthorized"), PermissionError, "refuses access"),
    (refused(404, "NoSuchBucket"), ConfigurationError, "no such bucket"),
    (refused(400, "AuthorizationHeaderMalformed"), ConfigurationError, "AuthorizationHeaderMalformed"),
    (refused(400, "InvalidRequest"), OSError, "400 InvalidRequest"),
]


@pytest.mark.parametrize(
    ("answer", "kind", "message"), REFUSALS, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
@pytest.mark.parametrize("operation", ["put_bytes", "read_bytes", "list", "delete"])
def test_case_24_what_will_not_pass_fails_at_once(storage, proxy, local, operation, answer, kind, message):
    proxy.behave = lambda _: answer
    with pytest.raises(kind, match=message) as failure:
        OPERATIONS[operation](storage, local)
    assert len(proxy.requests) == 1
    assert not isinstance(failure.value, UnavailableError)
    assert "root/flights" in str(failure.value)


def test_what_the_server_wrote_is_not_repeated():
    """Answers of AWS hold the key's id, and what was signed; so may those of what stands between."""
    body = "<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>AKIACANARY</AWSAccessKeyId></Error>"
    text = f"Error performing GET http://x in 1ms - Server returned non-2xx status code: 403 Forbidden: {body}"
    for error in (PermissionDeniedError(text), GenericError(text), FileNotFoundError(text), GenericError("AKIACANARY")):
        error_of_weir = translated(error, "s3://bucket/key")
        assert "CANARY" not in repr(error_of_weir) and error_of_weir.__cause__ is None
        assert "s3://bucket/key" in str(error_of_weir)


# -- uploads in parts


@pytest.fixture
def big(tmp_path: Path) -> Path:
    file = tmp_path / "big"
    file.write_bytes(os.urandom(3 * PART + 1))
    return file


def started(request: Request) -> bool:
    return request.method == "POST" and "?uploads" in request.path


def test_a_throttled_part_is_sent_again_and_not_the_others(storage, proxy, bucket, big):
    refusals = itertools.count()
    proxy.behave = lambda request: (
        SLOW_DOWN if request.part and request.at("partNumber=2") and next(refusals) < 2 else None
    )
    storage.put_file(big, "new")
    assert proxy.seen(started) == 1
    assert proxy.seen(lambda request: request.part) == 4 + 2
    assert bucket.content("root/flights/new") == big.read_bytes()


def test_a_part_that_is_refused_ends_the_upload_and_leaves_nothing(storage, proxy, bucket, big):
    proxy.behave = lambda request: refused(403, "AccessDenied") if request.part and request.at("partNumber=3") else None
    with pytest.raises(PermissionError):
        storage.put_file(big, "new")
    assert bucket.objects() == ["root/flights/there"]
    assert bucket.half_done() == [], "it was aborted"
    assert proxy.seen(started) == 1, "and not begun again"


def test_an_upload_whose_end_is_lost_is_done_again(storage, proxy, bucket, big):
    """The answer to the request that completes the upload never comes: whether it took effect is unknown."""
    completes = itertools.count()
    proxy.behave = lambda request: (
        SLOW_DOWN if request.method == "POST" and "uploadId=" in request.path and next(completes) < ATTEMPTS else None
    )
    storage.put_file(big, "new")
    assert bucket.content("root/flights/new") == big.read_bytes()


_UPLOAD = """
import sys
from pathlib import Path
from weir.settings.configuration import S3Settings
from state_ops.storage.storage import Storage
Storage(sys.argv[1], S3Settings.model_validate_json(sys.argv[2])).put_file(Path(sys.argv[3]), "new")
"""


def test_a_process_killed_in_the_middle_of_an_upload_leaves_nothing_visible(bucket, proxy, big):
    arrived = Arrived(proxy)
    settings = bucket.settings(proxy.port)
    child = subprocess.Popen(
        [sys.executable, "-c", _UPLOAD, f"s3://{bucket.name}/root/flights", settings.model_dump_json(), str(big)],
        cwd=PROJECT,
    )
    try:
        arrived.wait()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert bucket.objects() == []
    assert bucket.half_done() == ["root/flights/new"], "which a lifecycle rule removes"

    storage = bucket.storage()
    storage.put_file(big, "new")
    assert bucket.content("root/flights/new") == big.read_bytes()
    assert [file.path for file in storage.list(unfinished=True)] == ["new"]


class Arrived:
    """The first two parts are stored, the third is never answered."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        proxy.behave = lambda request: Hang() if request.part and not request.at("partNumber=1&") else None

    def wait(self) -> None:
        deadline = time.monotonic() + 30
        while self._proxy.seen(lambda request: request.part) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# -- listings


@pytest.fixture
def many(storage: Storage, bucket: Bucket, proxy: Proxy) -> list[str]:
    """More objects than one page of a listing has: here, two."""
    paths = [f"state/count/g1-e1/0-a/{number}.sst" for number in range(5)]
    for path in paths:
        bucket.client.put_object(Bucket=bucket.name, Key=f"root/flights/{path}", Body=b"")
    proxy.behave = in_pages
    return paths


def in_pages(request: Request) -> Request | None:
    return replace(request, path=f"{request.path}&max-keys=2") if request.listing else None


def second_page(fault: object) -> Callable[[Request], object]:
    return lambda request: fault if request.listing and "continuation-token" in request.path else in_pages(request)


@pytest.mark.parametrize(
    "fault", sampled([Cut(), refused(403, "AccessDenied"), SLOW_DOWN, Reset(), Hang()], 2), ids=str
)
def test_a_listing_is_complete_or_an_error(hurried, proxy, many, fault):
    """Not even the first page is handed out, and nothing is deleted by half a listing."""
    assert {file.path for file in hurried.list("state")} == set(many)
    assert proxy.seen(lambda request: request.listing) == 3
    proxy.behave = second_page(fault)
    with pytest.raises(OSError):
        hurried.list("state")
    with pytest.raises(OSError):
        hurried.delete_tree("state")
    assert proxy.seen(lambda request: request.method in ("DELETE", "POST")) == 0
    proxy.behave = in_pages
    assert hurried.delete_tree("state") == len(many)
    assert [file.path for file in hurried.list()] == ["there"]
