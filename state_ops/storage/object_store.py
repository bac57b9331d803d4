"""Object stores through obstore, and what its errors mean.

No message holds what a server wrote, only its status, its code and the kind of failure: answers repeat parts of the
request, AWS's the id of the key.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from state_ops.errors import ConfigurationError, first_line
from state_ops.redaction import error_code, error_status
from state_ops.s3_options import S3Options
from state_ops.storage.s3 import client_options, is_s3, obstore_arguments, retry_config
from state_ops.storage.store import ARRIVING, PART, StoredFile, UnavailableError

_PARTS_AT_ONCE = 4
_MAY_PASS = {"408", "409", "429", "500", "502", "503", "504"}
_CODES_THAT_MAY_PASS = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted"}
_CONFIGURED_WRONGLY = {"NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed"}
_KINDS = {
    "Timeout": "no answer in time",
    "Connect": "no connection",
    "Interrupted": "the connection broke",
    "Request": "the connection broke",
    "Decode": "the answer is not what S3 says",
}


class ObjectStore:
    """Objects below a prefix of a bucket: S3 by the settings' block; gs and abfs by their libraries' own
    environment."""

    remote = True

    def __init__(self, uri: str, s3: S3Options) -> None:
        self._uri = uri
        # `_once` for operations of one request, which `Storage` tries again; `_many` for those of many requests, where
        # one throttled part or page must not cost all the others.
        with self._translated(""):
            self._once, self._many = _open(uri, s3, 0), _open(uri, s3, s3.max_attempts - 1)

    def write(self, path: str, chunks: Iterator[bytes], size: int) -> None:
        with self._translated(path):
            if size <= PART:
                obstore.put(self._once, path, b"".join(chunks), use_multipart=False)
            else:  # an exception of `chunks` comes through as it is, after the upload was aborted
                obstore.put(
                    self._many, path, chunks, use_multipart=True, chunk_size=PART, max_concurrency=_PARTS_AT_ONCE
                )

    def create(self, path: str, data: bytes) -> bool:
        try:
            with self._translated(path):
                obstore.put(self._once, path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, path: str, start: int = 0) -> Iterator[bytes]:
        with self._translated(path):
            answer = obstore.get(self._many, path, options={"range": {"offset": start}} if start else None)
            yield from (bytes(chunk) for chunk in answer.stream(min_chunk_size=ARRIVING))

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        with self._translated(path):
            try:
                answer = obstore.get(self._once, path, options={"range": {"suffix": length}})
            except BaseError as error:
                # An empty object has no last bytes: S3 answers 416, other stores with the whole object.
                no_range = error_status(str(error)) == "416" or "NotPartial" in str(error)
                if no_range and obstore.head(self._once, path)["size"] == 0:
                    return b"", 0
                raise
            return bytes(answer.bytes()), answer.meta["size"]

    def part(self, path: str, start: int, length: int) -> bytes:
        with self._translated(path):
            return bytes(obstore.get_range(self._once, path, start=start, length=length))

    def size(self, path: str) -> int | None:
        try:
            with self._translated(path):
                return obstore.head(self._once, path)["size"]
        except FileNotFoundError:
            return None

    def on_disk(self, path: str) -> Path | None:  # noqa: ARG002  a store on a disk needs it
        return None

    def stamp(self, path: str) -> str | None:
        try:
            with self._translated(path):
                head = obstore.head(self._once, path)
        except FileNotFoundError:
            return None
        return f"{head['size']}-{head['last_modified'].isoformat()}-{head['e_tag']}"

    def list(self, path: str) -> Iterable[StoredFile]:
        with self._translated(path):
            for page in obstore.list(self._many, path or None):
                yield from (StoredFile(entry["path"], entry["size"]) for entry in page)

    def list_dirs(self, path: str) -> Iterable[str]:
        with self._translated(path):
            prefixes = obstore.list_with_delimiter(self._many, path or None)["common_prefixes"]
            return [PurePosixPath(prefix).name for prefix in prefixes]

    def delete(self, path: str) -> bool:
        with self._translated(path):
            obstore.delete(self._once, path)
        return True

    def delete_files(self, paths: Sequence[str]) -> None:
        with self._translated(paths[0]):
            obstore.delete(self._many, list(paths))

    def delete_all(self, path: str, files: Iterable[StoredFile]) -> None:
        with self._translated(path):
            obstore.delete(self._many, [file.path for file in files])

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise translated(error, f"{self._uri}/{path}") from None


def _open(uri: str, s3: S3Options, retries: int) -> Any:
    if is_s3(uri):
        bucket, _, prefix = uri.partition("://")[2].partition("/")
        return obstore.store.S3Store(bucket, prefix=prefix or None, **obstore_arguments(s3, retries))
    return obstore.store.from_url(uri, client_options=client_options(s3), retry_config=retry_config(s3, retries))  # type: ignore[call-overload]


def translated(error: Exception, where: str) -> OSError | ConfigurationError:
    """Translate an error of obstore to UnavailableError, FileNotFoundError, PermissionError, OSError or
    ConfigurationError.
    """
    text = str(error)
    status, code = error_status(text), error_code(text)
    if code in _CONFIGURED_WRONGLY or "incorrectly configured region" in text:
        return ConfigurationError(
            f"There is no such bucket in this region ({code or 'redirected'}).",
            where=where,
            next="Correct storage.root, storage.s3.region or storage.s3.endpoint.",
        )
    kind = re.search(r"kind: (\w+)", text)
    reason = " ".join(filter(None, [status, code])) or _KINDS.get(kind[1] if kind else "", _kind(error))
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{where}: {reason}")
    # obstore calls each 409 AlreadyExists. S3 answers so while another request for the same object is at work, and says
    # nothing of what is there then; 412 says that. Azure answers 409 to both, and tells them apart by the code.
    exists = isinstance(error, (AlreadyExistsError, PreconditionError))
    if exists and (status != "409" or code == "BlobAlreadyExists"):
        return FileExistsError(f"{where}: {reason}")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in ("401", "403"):
        return PermissionError(f"{where}: storage refuses access: {reason}")
    if status is None or status in _MAY_PASS or code in _CODES_THAT_MAY_PASS:
        return UnavailableError(f"{where}: {reason}")
    return OSError(f"{where}: {reason}")


def _kind(error: Exception) -> str:
    return type(error).__name__ if isinstance(error, BaseError) else first_line(error)
