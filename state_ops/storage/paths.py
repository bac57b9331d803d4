"""The names that Weir gives below a pipeline's root. What has no such name is somebody else's: reported by fsck,
deleted by nobody.

docs/reference/storage.md draws the tree.
"""

from __future__ import annotations

import hashlib
import re

HOLDS = "coordinator/holds"  # what running restores keep from being pruned
RESTORES = "registry/restores"  # the table of all restores

_UNFINISHED = r"(?:\.tmp-[^/]*-)?"
_EPOCH = r"g\d+-e\d+"
_DATA = r"data(?:-[0-9a-f]{8})?"
_ATTEMPT = r"\d+-[^/]+"
NUMBER_OR_OUTPUT = r"(?:\d+|[a-z][a-z0-9_]*)"
"""The name of a channel's file in an attempt's directory: rows of the stage's input, or of an output of that name."""
_STATE = re.compile(rf"state/[^/]+/{_EPOCH}/{_ATTEMPT}/[^/]+")
_CHANNEL = re.compile(
    rf"channels/[^/]+/{_EPOCH}/(?:{_ATTEMPT}/{_UNFINISHED}{NUMBER_OR_OUTPUT}|{_UNFINISHED}{_ATTEMPT})\.parquet"
)
_BLOCKS = re.compile(rf"exchange/[^/]+/{_EPOCH}/{_ATTEMPT}/{_UNFINISHED}\d+\.blocks")
_OUTPUT = re.compile(rf"outputs/[^/]+/{_EPOCH}/{_UNFINISHED}{_ATTEMPT}\.parquet")
_ROWS = re.compile(rf"tables/[^/]+/{_DATA}/{_EPOCH}/(?:{_UNFINISHED}{_ATTEMPT}|{_ATTEMPT}/{_UNFINISHED}\d+)\.parquet")
_REGISTRY_DATA = re.compile(rf"registry/\w+/(?:data|checkpoint_id=\d+)/{_UNFINISHED}\d{{20}}-[^/]+\.parquet")


def data_directory(table: str, app_id: str, elsewhere: bool) -> str:
    """Return the directory of a sink's table in which Weir stages its rows.

    Args:
        elsewhere: The table lies outside of the pipeline's storage, where other pipelines may write to it too; each has
            a directory of its own, in which it sweeps.
    """
    whose = f"-{hashlib.sha256(app_id.encode()).hexdigest()[:8]}" if elsewhere else ""
    return f"tables/{table}/data{whose}"


def is_staged(path: str) -> bool:
    """Return whether an attempt may have staged this object.

    That is part of a snapshot, rows of a channel or for a sink that is no table, or blocks of the exchange.
    """
    return any(name.fullmatch(path) for name in (_STATE, _CHANNEL, _OUTPUT, _BLOCKS))


def is_staged_rows(path: str) -> bool:
    """Return whether an attempt may have staged these rows in a table's directory."""
    return bool(_ROWS.fullmatch(path))


def is_registry_data(path: str) -> bool:
    """Return whether this may be a data file of the registry's tables."""
    return bool(_REGISTRY_DATA.fullmatch(path))
