"""Finds the store that a root belongs to, and refuses roots that no store can use."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pyarrow.fs as pafs

from state_ops.errors import ConfigurationError, first_line
from state_ops.s3_options import S3Defaults, S3Options
from state_ops.storage.filesystem_store import FileSystemStore
from state_ops.storage.store import Store

_ESCAPE = re.compile(r"%[0-9a-fA-F]{2}")


def open_store(uri: str, s3: S3Options | None = None) -> Store:
    """Return the store for a URI or a path. Raises ConfigurationError."""
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    if "@" in uri.partition("://")[2].partition("/")[0]:
        raise ConfigurationError(
            "The storage root holds credentials.",
            where="storage.root",
            next="Write s3://bucket/prefix; storage.s3 says by reference where the keys are.",
        )
    if scheme == "file" and _ESCAPE.search(unquote(uri) if "://" in uri else uri):
        # delta-rs writes below one decoding of a path, and the kernel in it reads below another; only a URI that is not
        # escaped means the same to both, and that is another directory. A test looks whether that is still so.
        raise ConfigurationError(
            "The storage root holds a percent sign and two hex digits, below which no library can open Delta tables.",
            where=f"storage.root = {uri}",
            next="Rename the directory, or give another one: spaces and other characters may stand in it as they are.",
        )
    try:
        if scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
            from state_ops.storage.object_store import ObjectStore  # and its library: not where there are only disks

            return ObjectStore(uri, s3 or default_s3())
        if "://" in uri:
            return FileSystemStore(*pafs.FileSystem.from_uri(uri))
        return FileSystemStore(pafs.LocalFileSystem(), uri)
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            "The storage root cannot be used: " + first_line(error),
            where=f"storage.root = {uri}",
            next="Give a directory or a URI such as s3://bucket/prefix.",
        ) from None


def default_s3() -> S3Options:
    return S3Defaults()
