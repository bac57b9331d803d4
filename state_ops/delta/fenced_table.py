"""Delta tables that Weir's control plane commits, through delta-rs and without a JVM.

`FencedTable` has one rule, which was found by playing the failing sequence: every commit is the entry right after a
version whose recorded transaction version equals our generation, with the same app id, and is put only if no entry is
there (`log_entries`). So the check and the commit share one version of the table, every time, retries included. And a
commit counts only when the version before it is there still: a coordinator that stood still in the middle of a commit
may put its entry where a cleanup has removed one. Claims and changes of the table itself, once a run, are delta-rs'
commits, on the handle that read the old generation. delta-rs lets a refreshed handle commit an equal or lower version,
rebases a commit with another app id or none, and does not refresh a handle by its own commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from threading import RLock
from typing import ParamSpec, TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from state_ops.delta import log_cleanup, log_entries
from state_ops.delta.log_entries import DataFile, TableVersion, active_files
from state_ops.delta.table_files import TableFiles
from state_ops.errors import ConfigurationError, DamageError, FencedError, first_line, plainly
from state_ops.ids import Generation
from state_ops.logs import Logger
from state_ops.redaction import error_status, scrubbed, scrubbing
from state_ops.storage.storage import Storage

log = Logger("weir.delta_log")

T = TypeVar("T")
Params = ParamSpec("Params")

_MAX_RACES = 20
_MAX_OPENS = 3
_MAX_CREATES = 5
PROBE = ".probe-"
_CONFIGURATION = {"delta.enableDeletionVectors": "false", "delta.checkpointInterval": "100"}
_NO_CLEANUP = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_TRY = "weir.try"
_FORGETS = "delta.setTransactionRetentionDuration"


class Table(DeltaTable):
    """delta-rs' handle of a table. Its errors hold what a server has answered, so they are scrubbed wherever a method
    asks storage.

    What `alter` returns, and delta-rs' functions, are called inside `scrubbing()`.
    """

    __init__ = scrubbed(DeltaTable.__init__)
    create_checkpoint = scrubbed(DeltaTable.create_checkpoint)
    create_write_transaction = scrubbed(DeltaTable.create_write_transaction)
    get_add_actions = scrubbed(DeltaTable.get_add_actions)
    history = scrubbed(DeltaTable.history)
    restore = scrubbed(DeltaTable.restore)
    to_pyarrow_dataset = scrubbed(DeltaTable.to_pyarrow_dataset)
    to_pyarrow_table = scrubbed(DeltaTable.to_pyarrow_table)
    transaction_version = scrubbed(DeltaTable.transaction_version)
    update_incremental = scrubbed(DeltaTable.update_incremental)
    vacuum = scrubbed(DeltaTable.vacuum)


_BUSY = "Invalid table version"  # delta-rs says so where a 409 met a commit, and no entry is found


@contextmanager
def _committing() -> Iterator[None]:
    """Around a commit of delta-rs. CommitFailedError: there is another entry, or the store was busy with that very
    object (S3's 409).

    delta-rs takes a 409 for an entry, and then does not find it.
    """
    try:
        with scrubbing():
            yield
    except DeltaError as error:
        if _BUSY not in str(error):
            raise
        raise CommitFailedError(f"The store was busy with the entry: {first_line(error)}") from error


def was_busy(error: DeltaError) -> bool:
    """Return whether a write of delta-rs failed because the store was busy with an object (S3's 409).

    That very put has written nothing, and trying again helps.
    """
    return _BUSY in str(error) or error_status(str(error)) == "409"


@scrubbing()
def is_table(uri: str, options: dict[str, str] | None) -> bool:
    """Return whether there is a Delta table at a URI.

    Args:
        options: Of its storage.
    """
    return DeltaTable.is_deltatable(uri, options)


def exists(storage: Storage, path: str) -> bool:
    """Return whether there is a Delta table at `path`."""
    return is_table(storage.full(path), storage.delta_options)


def open_table(storage: Storage, path: str, version: int | None = None) -> Table:
    """Return a handle on the table at `path`, relative to the storage's root. Raises TableNotFoundError."""
    table: Table = Table(storage.full(path), version=version, storage_options=storage.delta_options)
    return table


def ensure_table(
    storage: Storage,
    path: str,
    schema: pa.Schema,
    partition_by: Sequence[str] = (),
    configuration: dict[str, str] | None = None,
) -> None:
    """Create the table unless it exists."""
    for left in reversed(range(_MAX_CREATES)):
        if exists(storage, path):
            return
        try:
            with _committing():
                DeltaTable.create(
                    storage.full(path),
                    schema=schema,
                    mode="ignore",
                    partition_by=list(partition_by),
                    configuration=_CONFIGURATION | (configuration or {}),
                    storage_options=storage.delta_options,
                )
            return
        except CommitFailedError:
            # Somebody else created it at the same moment, or the store was busy with that very object (S3's 409): look
            # again.
            if not left and not exists(storage, path):
                raise


def commit(
    handle: DeltaTable,
    app_id: str,
    version: int,
    adds: Sequence[DataFile] = (),
    removes: Sequence[DataFile] = (),
    metadata: dict[str, str] | None = None,
    cleanup: PostCommitHookProperties | None = None,
) -> None:
    """Commit on exactly this handle. Raises CommitFailedError when another commit with this app id came between.

    Args:
        cleanup: What delta-rs itself does to the log afterwards; by default nothing.
    """
    with _committing():
        handle.create_write_transaction(
            [file.add_action() for file in adds] + [file.remove_action() for file in removes],
            mode="append",
            schema=handle.schema(),
            partition_by=handle.metadata().partition_columns or None,
            commit_properties=_properties(app_id, version, metadata),
            post_commithook_properties=cleanup or _NO_CLEANUP,
        )


def _properties(app_id: str, version: int, metadata: dict[str, str] | None = None) -> CommitProperties:
    return CommitProperties(
        custom_metadata=metadata, app_transactions=[Transaction(app_id, version)], max_commit_retries=3
    )


def probe_conditional_put(storage: Storage, after: Generation) -> None:
    """Make sure that the store refuses a second conditional put: fencing stands and falls with that.

    Two handles of a scratch table commit the same version; exactly one may win. Raises ConfigurationError otherwise.

    Args:
        after: The generation that owns the registry now. Owners of later ones may delete the scratch table
            (`remove_probes`).
    """
    path = f"registry/{PROBE}g{after}-{uuid.uuid4().hex}"
    try:
        ensure_table(storage, path, pa.schema([("probe", pa.int64())]))
        first, second = open_table(storage, path), open_table(storage, path)
        for left in reversed(range(_MAX_CREATES)):
            try:
                commit(first, "probe", 1)
                break
            except (
                CommitFailedError
            ):  # S3's 409, which says nothing of what is there, or our own entry, whose answer was lost
                if storage.read_bytes(log_entries.entry_path(path, 1)) is not None:
                    break
                if not left:
                    raise
        # delta-rs looks for newer versions before it writes one: only a put of our own shows what the store does.
        storage.create(f"{path}/put", b"first")
        if not storage.create(f"{path}/put", b"second"):
            try:
                commit(second, "probe", 1)
            except CommitFailedError:
                return
        raise ConfigurationError(
            "This storage lets two writers commit the same table version.",
            where=storage.uri,
            next="Use a store with conditional puts (a local or NFSv4 disk, S3, GCS, ABFS): without them nothing "
            "fences a zombie.",
        )
    finally:
        storage.delete_tree(path)


def remove_probes(storage: Storage, generation: Generation) -> None:
    """Delete scratch tables of probes that were killed, for the owner of `generation`.

    Those that began under it stay: a taker may be at work in one of them.
    """
    current = f"{PROBE}g{generation}-"
    for name in storage.list_dirs("registry"):
        if name.startswith(PROBE) and not name.startswith(current):
            storage.delete_tree(f"registry/{name}")


def _alone(method: Callable[Params, T]) -> Callable[Params, T]:
    """Let one thread in at a time: epochs are committed beside the publishing and pruning of older ones, on the same
    tables."""

    @wraps(method)
    def locked(*args: Params.args, **options: Params.kwargs) -> T:
        with args[0]._lock:  # type: ignore[attr-defined]
            return method(*args, **options)

    return locked


class FencedTable(TableFiles):
    """A Delta table that only the coordinator with the current generation can commit to.

    Args:
        storage: The pipeline's storage.
        path: The table's directory in it.
        app_id: Constant for the registry.
        optional: Columns that an older release did not write; take-over adds them, and rows without them have nulls
            there.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        schema: pa.Schema,
        app_id: str,
        partition_by: Sequence[str] = (),
        optional: Collection[str] = (),
    ):
        super().__init__(storage, path, schema, partition_by, optional)
        self.app_id = app_id
        self._version: TableVersion | None = None
        self._properties: dict[str, str] | None = None  # when it was opened last, until `upgrade` has seen them
        self._present: set[str] = set()  # its fields then
        self._lock = RLock()
        self.cleanup_due = False  # by a commit of this object

    def ensure(self) -> None:
        ensure_table(self.storage, self.path, self.schema, self._partition_by, log_cleanup.PROPERTIES)

    # -- reading

    @_alone
    def newest(self) -> TableVersion | None:
        """Return the table's newest version, or None if the table does not exist yet."""
        if self._version is not None:
            self._version = log_entries.newest_after(self._version, self.app_id)
        for left in reversed(range(_MAX_OPENS)):
            if self._version is not None:
                break
            try:
                self._version = self._opened()
            except TableNotFoundError:
                return None
            except (DeltaError, FileNotFoundError) as error:  # a cleanup may overtake a slow opener, but not for ever
                if not left:
                    raise _unreadable(self.storage.full(self.path), error) from error
        return self._version

    def _opened(self) -> TableVersion:
        handle = open_table(self.storage, self.path)
        self._properties = handle.metadata().configuration
        self._present = {field.name for field in handle.schema().fields}
        self._check_columns()
        opened = log_entries.read_version(self.storage, self.path, handle, self.app_id, active_files(handle))
        # Only now: an entry that stands where another one was cleaned away is a zombie's.
        if opened is None or log_cleanup.may_be_cleaned(log_cleanup.log_names(self.storage, self.path), opened.number):
            raise FileNotFoundError(self.storage.full(log_entries.entry_path(self.path, handle.version())))
        return opened

    @_alone
    def last_known(self) -> TableVersion | None:
        """Return the version that this object saw or made last, without a request.

        For the owner of the generation, whose commits are the only ones: what it decides from this takes effect by a
        commit right after this very version, or once it has proved that it owns the table still.
        """
        return self._version if self._version is not None else self.newest()

    def look(self, see: Callable[[TableVersion], T]) -> T | None:
        """Return the result of `see` for the newest version; None if there is no table.

        Pruning deletes files and log cleanup entries at once, so a reader that loses that race looks again. Raises
        DamageError when something is missing although nobody has committed meanwhile.
        """
        while True:
            version = self.newest()
            if version is None:
                return None
            try:
                return see(version)
            except (DeltaError, FileNotFoundError) as error:
                if not self._has_moved(version.number):
                    raise _unreadable(self.storage.full(self.path), error) from error

    def read(self, read: Callable[[list[DataFile]], T], *, as_owner: bool = False) -> T:
        """Return the result of `read` for the newest version's files; for no files if there is no table. Raises as
        `look` does.

        Args:
            as_owner: Read the version that `last_known` gives, without a request.
        """
        if as_owner and (version := self.last_known()) is not None:
            with suppress(FileNotFoundError):  # a successor has pruned: look at what there is now
                return read(list(version.files.values()))

        def see(version: TableVersion) -> tuple[T]:
            return (read(list(version.files.values())),)

        seen = self.look(see)
        return seen[0] if seen is not None else read([])

    def generation(self) -> Generation:
        """Return the generation that owns the table now; 0 if nobody ever claimed it."""
        return Generation(self.look(lambda version: version.transaction_version(self.app_id) or 0) or 0)

    @_alone
    def _has_moved(self, version: int) -> bool:
        """Open the table anew and return whether it has a newer version than this one."""
        self._version = None
        newest = self.newest()
        return newest is not None and newest.number > version

    # -- writing

    @_alone
    def claim(self, generation: Generation | None = None, *, after: Generation | None = None) -> Generation:
        """Take the table over: commit `generation` (default: one more than the recorded) on the handle that read the
        old one.

        Of two takers on the same old generation exactly one wins; the other gets FencedError. With a given generation,
        which won elsewhere, a rival that is late with a lower one only delays us.

        A claim is ours only if the newest version is the very one that we made: a taker that stood still meanwhile may
        have put it where the winner's cleanup had removed one, and both would go by the same number.

        Each try has an id in its entry. A store that reports an error may have put the entry all the same, and what is
        put again, by delta-rs or by whoever retries, then meets it: the id says that it is ours.

        Args:
            after: The recorded one, else FencedError.
        """
        expected, self._properties = after, None
        for _ in range(_MAX_RACES):
            handle = open_table(self.storage, self.path)
            version = handle.version()
            attempt = uuid.uuid4().hex
            try:
                old = handle.transaction_version(self.app_id) or 0
                if after is not None and old != after:
                    raise fenced(self.path, after, Generation(old))
                if generation is None and expected is not None and old != expected:
                    break
                mine = Generation(old + 1) if generation is None else generation
                if generation is not None and old == mine:
                    return mine  # nobody else has this number: an earlier try landed, although an error was reported
                if mine <= old:
                    raise fenced(self.path, mine, Generation(old))
                expected = Generation(old)
                commit(handle, self.app_id, mine, metadata={_TRY: attempt})
            except (DeltaError, OSError) as error:
                entry = self.storage.read_bytes(log_entries.entry_path(self.path, version + 1))
                if entry is None and isinstance(error, CommitFailedError):
                    continue  # the store was busy with that very object (S3's 409): there is nobody's entry
                if entry is None and not self._has_moved(version):
                    raise
                if entry is None or attempt.encode() not in entry:
                    if generation is None:
                        break
                    continue
            self._version = None
            if self.look(lambda newest: newest.number) == version + 1:
                return mine
            if generation is None:
                break
        raise FencedError(
            f"Another coordinator took {self.path} over at the same moment.",
            next="Nothing was changed. That one has the pipeline: ask again once it has ended.",
        )

    @_alone
    def commit(
        self,
        generation: Generation,
        adds: Sequence[DataFile] = (),
        removes: Sequence[DataFile] = (),
        check: Callable[[TableVersion], None] | None = None,
    ) -> None:
        """Commit under our generation, after `check` has looked at the very version that the commit follows.

        Any other exception means: outcome unknown.

        Raises:
            FencedError: A higher generation owns the table.
        """
        version = self._appended(generation, adds, removes, check)
        self.cleanup_due = self.cleanup_due or log_cleanup.is_due(version.number)

    def _appended(
        self,
        generation: Generation,
        adds: Sequence[DataFile],
        removes: Sequence[DataFile],
        check: Callable[[TableVersion], None] | None,
    ) -> TableVersion:
        """Put an entry after the last version, as often as other commits come between; returns the version that it
        made."""
        for race in range(_MAX_RACES):
            before = self.newest() if race else self.last_known()
            assert before is not None, f"{self.path} was not ensured"
            try:
                self._check_owner(before, generation)
                if check is not None:
                    check(before)
            except FencedError:
                if race:
                    raise
                continue  # nobody is told that from what was known a while ago
            self._version = None  # whatever happens now: only what is confirmed is known
            try:
                version = log_entries.append(before, self.app_id, generation, adds, removes)
                if log_entries.still_there(before):
                    self._version = version
                    return version
            except CommitFailedError:
                pass  # somebody else committed: look again, with the same rules
        raise _raced(self.path)

    def _check_owner(self, version: TableVersion | DeltaTable, generation: Generation) -> None:
        owner = Generation(version.transaction_version(self.app_id) or 0)
        if owner != generation:
            raise fenced(self.path, generation, owner)

    @_alone
    def _alter(self, generation: Generation, act: Callable[[DeltaTable], None]) -> None:
        """Let `act` commit through delta-rs, on a handle on which we own the table."""
        for _ in range(_MAX_RACES):
            handle = open_table(self.storage, self.path)
            self._check_owner(handle, generation)
            try:
                act(handle)
            except CommitFailedError:
                continue
            except (DeltaError, FileNotFoundError):
                if not self._has_moved(handle.version()):
                    raise
                continue  # so many others committed that entries which this handle needs have been cleaned away
            self._version = None
            newest = self.newest()  # it counts if the newest version is ours still, as in `claim`
            assert newest is not None
            self._check_owner(newest, generation)
            return
        raise _raced(self.path)

    # -- log cleanup, by the owner

    def keep_up(self, generation: Generation) -> None:
        """Shorten the log, beside commits. Whatever fails in it is done by the next cleanup. Raises FencedError when a
        higher generation owns the table."""
        try:
            with self._lock:
                self.cleanup_due = False
                newest = self.newest()
                assert newest is not None, f"{self.path} was not ensured"
                self._check_owner(newest, generation)
            log_cleanup.write_checkpoint(open_table(self.storage, self.path, newest.number))
            log_cleanup.clean_up(self.storage, self.path)
        except (DeltaError, OSError) as error:
            log.warning("the log of a registry table was not cleaned up", table=self.path, error=plainly(error))

    def upgrade(self, generation: Generation) -> None:
        """Give a table of an older release this one's properties and columns, and its log the cleanup that it lacks.

        Right after `claim`, which has opened the table, what it had then counts.
        """
        if self._properties is None:
            self._version = None
            self.newest()
        properties = self._properties or {}
        if properties.get(_FORGETS):
            raise ConfigurationError(
                f"The table {self.path} forgets transaction versions ({_FORGETS}).",
                where=self.storage.full(self.path),
                next="Unset that property: the version is the generation, which keeps zombies out.",
            )
        if any(properties.get(name) != value for name, value in log_cleanup.PROPERTIES.items()):
            self._alter(generation, lambda handle: _set_properties(handle, self.app_id, generation))
        lacking = [Field.from_arrow(field) for field in self.schema if field.name not in self._present]
        if lacking:
            self._alter(generation, lambda handle: _add_columns(handle, self.app_id, generation, lacking))
        self._properties = None
        if log_cleanup.is_overdue(log_cleanup.log_names(self.storage, self.path)):
            self.keep_up(generation)

    def _check_columns(self) -> None:
        lacking = [name for name in self.schema.names if name not in self._present and name not in self._optional]
        if lacking:
            raise DamageError(
                f"The registry's table {self.path} has no column {', '.join(lacking)}.",
                where=self.storage.full(self.path),
                next="Find out who rewrote it: Weir never drops a column. Bring the table back from a backup of the "
                "bucket.",
            )


def _raced(path: str) -> FencedError:
    return FencedError(
        f"{_MAX_RACES} commits to {path} in a row met another writer.",
        next="Find out who else writes to the registry; it belongs to the coordinator alone.",
    )


def _unreadable(where: str, error: Exception) -> Exception:
    """Return the error for a table that cannot be read: damage for a missing file, else what Delta says."""
    if isinstance(error, FileNotFoundError) or "not found" in str(error).lower():
        return DamageError(
            "A file of the registry is missing from storage.",
            where=f"{where}: {plainly(error)}",
            next="Nothing was deleted. Bring the file back from a backup of the bucket.",
        )
    return error


@_committing()
def _set_properties(handle: DeltaTable, app_id: str, generation: Generation) -> None:
    handle.alter.set_table_properties(
        log_cleanup.PROPERTIES,
        commit_properties=_properties(app_id, generation),
        post_commithook_properties=_NO_CLEANUP,
    )


@_committing()
def _add_columns(handle: DeltaTable, app_id: str, generation: Generation, columns: list[Field]) -> None:
    handle.alter.add_columns(
        columns, commit_properties=_properties(app_id, generation), post_commithook_properties=_NO_CLEANUP
    )


def fenced(path: str, mine: Generation, owner: Generation) -> FencedError:
    return FencedError(
        f"This coordinator has generation {mine}, but {path} belongs to generation {owner}.",
        next="Nothing to do: a newer coordinator runs the pipeline; this one stops and deletes nothing.",
    )
