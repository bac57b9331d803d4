"""Find two sinks of a pipeline that are one table by two names."""

from __future__ import annotations

import os
import re

from state_ops.errors import PipelineError
from state_ops.storage.storage import Storage
from weir.connectors.delta.table_commit import table_path
from weir.definition import Pipeline

_S3 = re.compile(r"s3[an]?://", re.IGNORECASE)


def check_places(pipeline: Pipeline, storage: Storage) -> None:
    """Refuse two sinks whose tables are one: each would take the other's files for its own leftovers, and its marker
    would not see the other's commits.

    Two sinks may share a topic or a table of a database: each has a marker of its own there.

    Args:
        storage: The pipeline's, with what lies elsewhere mounted: placeholders are filled.

    Raises:
        PipelineError: Two tables are one, or one lies within another.
    """
    places: dict[str, str] = {}
    for sink in pipeline.tables:
        places[sink.name] = _place(storage, sink.name)
    for name, place in places.items():
        for other, there in places.items():
            if other != name and (place == there or place.startswith(f"{there}/")):
                how = "lie at one place" if place == there else f"lie in each other ({place})"
                first, second = sorted((name, other))
                raise PipelineError(
                    f"The tables of the sinks {first} and {second} {how}: one would delete rows of the other.",
                    where=there,
                    next="Let one stage write to it, behind a union of both; or give each a table of its own.",
                )


def _place(storage: Storage, name: str) -> str:
    """Return the place of a table in one spelling.

    Links are followed on a disk. In a bucket there is one scheme and no empty part.
    """
    full = storage.full(table_path(name))
    if storage.is_local:
        return os.path.realpath(full.removeprefix("file://"))
    scheme, _, path = _S3.sub("s3://", full).partition("://")
    return f"{scheme}://{'/'.join(part for part in path.split('/') if part not in ('', '.'))}"
