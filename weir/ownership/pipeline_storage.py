"""Opening a pipeline's storage, registry and source readers, and what their errors mean for an operator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from deltalake.exceptions import DeltaError

from state_ops.backends import loader
from state_ops.backends.base import BackendOptions
from state_ops.checkpoints.registry import Registry
from state_ops.errors import DISK_FULL, ConfigurationError, DiskFullError, TransientError, look_there, plainly
from state_ops.fsck.survey import UNREADABLE
from state_ops.logs import Logger
from state_ops.records.snapshot_files import INPUT, StateFile
from state_ops.redaction import scrubbing
from state_ops.storage import disks
from state_ops.storage.instrumented_store import RequestCounts
from state_ops.storage.storage import Storage
from weir.connectors.delta.table_commit import table_path
from weir.definition import Pipeline, Source
from weir.definition.source import LOOKING, Opening, Position
from weir.settings.configuration import Settings
from weir.sources.connector_reader import ConnectorReader
from weir.sources.files import FilesReader
from weir.sources.landed_files import LANDED, LandedFiles
from weir.sources.positions import has_read
from weir.sources.reader import SourceReader

log = Logger("weir.run")


def open_storage(pipeline: Pipeline, settings: Settings) -> tuple[Storage, Registry]:
    """Return the pipeline's storage and registry; reading them needs no right and starts nothing."""
    storage = _opened(pipeline, settings, None, {})
    return storage, Registry(storage, pipeline.app_id)


def _opened(pipeline: Pipeline, settings: Settings, counts: RequestCounts | None, more: Mapping[str, str]) -> Storage:
    """Open the pipeline's storage. more: Mounts beside those of the code's tables."""
    mounts = {table_path(name): settings.resolve(pipeline.name, at) for name, at in pipeline.elsewhere.items()}
    keeper = loader.keeper(settings.state.backend, backend_options(settings))
    return Storage(settings.storage_uri(pipeline.directory), settings.storage.s3, counts, {**mounts, **more}, keeper)


def backend_options(settings: Settings) -> BackendOptions:
    """Return what the settings say to a state backend."""
    state = settings.state
    return BackendOptions(state.memory_mb, state.max_state_size_mb, dict(state.options), compression=state.compression)


@contextmanager
def nothing_kept(storage: Storage) -> Iterator[None]:
    """Delete at the end the state in a storage that is only used to try something out.

    Its files go with their directory. Snapshots that a state backend keeps do not.
    """
    try:
        yield
    finally:
        if storage.keeper is not None:
            storage.delete_tree("state")


def reaching(
    pipeline: Pipeline, settings: Settings, places: Mapping[str, str], counts: RequestCounts | None = None
) -> Storage:
    """Open the pipeline's storage so that it reaches tables at other places than those that the code says.

    Args:
        places: By table. One that cannot be listed, or whose placeholders the configuration has no more, is left out
            and logged: what the code has no more must not keep a pipeline from starting, or from being checked.
        counts: Where requests are counted.
    """
    uri, s3 = settings.storage_uri(pipeline.directory), settings.storage.s3
    mounts: dict[str, str] = {}
    for name, at in places.items():
        path = table_path(name)
        try:
            mount = {path: settings.resolve(pipeline.name, at)}
            Storage(uri, s3, counts, mount).list_dirs(path)
        except UNREADABLE as error:
            log.warning(
                "a table of a sink that the code has no more cannot be reached", table=name, at=at, why=plainly(error)
            )
            continue
        mounts |= mount
    return _opened(pipeline, settings, counts, mounts)


def readers(
    pipeline: Pipeline,
    settings: Settings,
    patience: float = LOOKING,
    request_counts: RequestCounts | None = None,
    archived: Settings | None = None,
) -> dict[str, SourceReader]:
    """Return a reader for each source, its placeholders filled from the configuration.

    A branch's readers read what its pipeline has read, and no more. A reader connects to its system when it is first
    used.

    Args:
        patience: Seconds after which a server that does not answer is away.
        request_counts: Where requests for what is landed are counted.
        archived: Whose storage has what was archived; None: the settings'.
    """
    trunk = open_storage(replace(pipeline, branch=None), settings)[1] if pipeline.branch is not None else None

    root, s3 = settings.storage_uri(pipeline.directory), settings.storage.s3

    def reader(source: Source) -> SourceReader:
        landed = LandedFiles(root, source.name, s3, settings.work_dir / LANDED, request_counts)
        files = source.capabilities.files
        if files is not None:
            pattern = settings.resolve(pipeline.name, files.pattern)
            only = partial(_read_by, trunk, source.name) if trunk is not None else None
            return FilesReader(source, pattern, s3, only, landed)
        opening = partial(_opening, pipeline, settings, source, patience)
        upto = partial(_position, trunk, source.name) if trunk is not None else None
        return ConnectorReader(source, opening, landed, upto, partial(_archives, pipeline, archived or settings))

    return {source.name: reader(source) for source in pipeline.sources}


def _opening(pipeline: Pipeline, settings: Settings, source: Source, patience: float) -> Opening:
    options = settings.connection(source.connection)
    resolve = partial(settings.filled, pipeline.name)
    return Opening(pipeline.title, resolve, options, settings.storage.s3, patience, settings.connection)


def _archives(pipeline: Pipeline, settings: Settings) -> list[tuple[Storage, list[StateFile]]]:
    """Return the archives of input that may be read again: this pipeline's, and for a branch also its trunk's."""
    archives = []
    for place in (pipeline, *([replace(pipeline, branch=None)] if pipeline.branch is not None else [])):
        storage, registry = open_storage(place, settings)
        head = registry.head()
        archives.append((storage, [file for file in registry.files(head) if file.kind == INPUT] if head else []))
    return archives


def _position(trunk: Registry, source: str) -> Position | None:
    """Return how far a pipeline has read a source by its newest checkpoint, or None."""
    head = trunk.head()
    return head.offsets.get(source) if head else None


def _read_by(trunk: Registry, source: str) -> Callable[[str], bool]:
    """Return the files of a source, by name, that a pipeline has read."""
    return has_read(_position(trunk, source))


@contextmanager
def storage_errors(pipeline: Pipeline, settings: Settings, storage: Storage) -> Iterator[None]:
    """Raise errors of storage or of a Delta log as errors that tell the operator what to do.

    It holds from the first look at the lease on, for all that happens between epochs.

    Where a disk is full, the error says which, whatever it is that did not fit.
    """
    try:
        with scrubbing():
            yield
    except DiskFullError:  # of the host that has met it, which need not be this one
        raise
    except TransientError as error:
        full_disk = disks.full(error, places(settings, storage))
        if full_disk is not None:
            error.where = f"{error.where}; {full_disk}" if error.where else full_disk
            error.next = f"Make room on that disk: {DISK_FULL}. {error.next or ''}".rstrip()
        raise
    except (OSError, DeltaError) as error:
        _refuse_without_links(storage)
        full_disk = disks.full(error, places(settings, storage))
        raise TransientError(
            plainly(error),
            where=full_disk or storage.uri,
            next=(
                f"{f'Make room on that disk ({DISK_FULL})' if full_disk else look_there(error)}, then `weir run"
                f" {pipeline.title}`: it resumes from the last checkpoint."
            ),
        ) from error


def _refuse_without_links(storage: Storage) -> None:
    """Raise ConfigurationError if a directory of the storage lies on a disk without hard links: Delta's commits are
    made by them."""
    for place in storage.directories():
        try:
            lacks = not disks.has_links(place)
        except OSError:  # what is wrong there is something else
            continue
        if lacks:
            raise ConfigurationError(
                "The disk of the storage has no hard links, by which commits of Delta tables are made.",
                where=str(place),
                next="Move storage.root, or this table, to another disk or an object store. A disk without hard links "
                "(FAT, exFAT, some shared folders) can hold local.work_dir, where files are copied instead.",
            )


def places(settings: Settings, storage: Storage) -> dict[str, str | Path]:
    """Return the places on disks to which Weir writes, by setting."""
    here = {"local.work_dir": settings.work_dir, "temporary files": Path(tempfile.gettempdir())}
    return here | ({"storage.root": storage.uri} if storage.is_local else {})
