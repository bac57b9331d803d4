from __future__ import annotations

import hashlib
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import DamageError, TransientError
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import Snapshot
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.object_cache import ObjectCache
from state_ops.snapshots.sweep import SORTING, sweep
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch

Entries = dict[bytes, bytes]


class Subtask:
    """One subtask that snapshots epoch after epoch, as the keyed task drives it."""

    def __init__(self, directory: Path) -> None:
        self.storage = Storage(str(directory / "storage"))
        self.home = directory / "work" / "counts" / "0"

    def attempt(self, epoch: int, generation: int = 1, id: str | None = None) -> Attempt:
        return Attempt(
            "counts", 0, Generation(generation), CheckpointId(epoch), AttemptId(id or new_attempt_id()), self.home
        )

    def write(self, attempt: Attempt, base: Snapshot | None, entries: Entries, *, full: bool = False) -> Snapshot:
        forked = snapshot.working_copy(self.storage, attempt, base)
        backend = RocksDBBackend(forked.db, 16)
        try:
            backend.write(list(entries.items()))
            files = snapshot.take(attempt, backend)
        finally:
            backend.close()
        return snapshot.upload(self.storage, attempt, snapshot.prepare(attempt, forked, files), base, full=full)

    def epoch(
        self, number: int, base: Snapshot | None, entries: Entries, generation: int = 1, *, full: bool = False
    ) -> Snapshot:
        return self.write(self.attempt(number, generation), base, entries, full=full)

    def read(self, base: Snapshot) -> Entries:
        """What the next epoch would find."""
        attempt = self.attempt(99)
        forked = snapshot.working_copy(self.storage, attempt, base)
        backend = RocksDBBackend(forked.db, 16)
        try:
            return dict(backend.scan(b"", b"\xff" * 9))
        finally:
            backend.close()

    def forget_local(self) -> None:
        for directory in list(self.home.iterdir()):
            self.remove(directory)

    @staticmethod
    def remove(directory: Path) -> None:
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        directory.rmdir()

    def directory(self, of: Snapshot) -> Path:
        (directory,) = self.home.glob(f"*-{of.attempt}")
        return directory


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(tmp_path)


def entries(*numbers: int, value: bytes = b"v") -> Entries:
    return {f"key{number:05}".encode(): value + str(number).encode() for number in numbers}


def tables(of: Snapshot) -> dict[str, str]:
    """The snapshot's SSTs: name to object."""
    return {file.name: file.path for file in of.files if file.name.endswith(".sst")}


# -- incremental


def test_a_fork_links_tables_and_copies_what_rocksdb_appends_to(subtask):
    base = subtask.epoch(1, None, entries(1))
    attempt = subtask.attempt(2)
    forked = snapshot.working_copy(subtask.storage, attempt, base)
    local = subtask.directory(base) / "snapshot"
    assert {file.name for file in base.files} == {path.name for path in forked.db.iterdir()}
    for path in forked.db.iterdir():
        shared = path.stat().st_ino == (local / path.name).stat().st_ino
        assert shared == path.name.endswith(".sst"), path.name


def test_writing_to_a_fork_leaves_the_base_as_it_was(subtask):
    base = subtask.epoch(1, None, entries(1, 2))
    subtask.epoch(2, base, entries(2, 3, value=b"new"))
    assert subtask.read(base) == entries(1, 2)
    subtask.forget_local()
    assert subtask.read(base) == entries(1, 2)


def test_only_new_tables_are_uploaded(subtask):
    first = subtask.epoch(1, None, entries(1))
    before = {file.path for file in subtask.storage.list("state")}
    second = subtask.epoch(2, first, entries(2))
    uploaded = {file.path for file in subtask.storage.list("state")} - before
    assert uploaded == {file.path for file in second.files if file.new}
    assert tables(first).items() <= tables(second).items()
    assert len([name for name in tables(second) if name not in tables(first)]) == 1
    old = [file for file in second.files if not file.new]
    assert {file.attempt for file in old} == {first.attempt}
    assert {file.snapshot for file in second.files} == {second.attempt}


def test_state_that_did_not_change_names_the_same_objects(subtask):
    base = subtask.epoch(1, None, entries(1, 2))
    files = snapshot.unchanged(base)
    assert [file.path for file in files] == [file.path for file in base.files]
    assert not any(file.new for file in files)
    assert {file.snapshot for file in files} == {base.attempt}  # whose local directory still serves the next epoch
    assert snapshot.unchanged(None) == ()


def test_what_a_compaction_merges_is_uploaded_and_the_merged_tables_are_named_no_more(subtask):
    chance, model, base = random.Random(3), {}, None
    shrank = False
    for epoch in range(1, 25):
        changed = entries(*(chance.randrange(60) for _ in range(8)), value=f"e{epoch}-".encode())
        model |= changed
        newer = subtask.epoch(epoch, base, changed)
        if base is not None:
            kept = {file.path for file in newer.files if not file.new}
            assert kept <= set(tables(base).values())
            shrank = shrank or len(tables(newer)) < len(tables(base))
        sweep(subtask.attempt(epoch + 1), {newer.attempt}, (), 1)
        base = newer
    assert shrank
    assert len(tables(base)) < 12
    assert subtask.read(base) == model
    subtask.forget_local()
    assert subtask.read(base) == model


# -- identity of files


def test_case_20_another_attempts_table_of_the_same_name_and_size_is_never_taken_for_ours(subtask):
    base = subtask.epoch(1, None, entries(1))
    lost = subtask.epoch(2, base, entries(2, value=b"lost"))
    won = subtask.epoch(2, base, entries(2, value=b"won!"))
    by_name = {file.name: file for file in lost.files}
    (mine,) = [file for file in won.files if file.name.endswith(".sst") and file.new]
    twin = by_name[mine.name]
    assert (twin.name, twin.bytes) == (mine.name, mine.bytes)
    assert twin.digest != mine.digest and twin.path != mine.path
    third = subtask.epoch(3, won, entries(3))
    assert tables(third)[mine.name] == mine.path
    for forget in (False, True):
        if forget:
            subtask.forget_local()
        assert subtask.read(third) == entries(1) | entries(2, value=b"won!") | entries(3)


def test_a_file_that_is_not_the_inherited_inode_is_uploaded(subtask):
    base = subtask.epoch(1, None, entries(1))
    attempt = subtask.attempt(2)
    forked = snapshot.working_copy(subtask.storage, attempt, base)
    (name,) = tables(base)
    target = attempt.directory / "snapshot"
    target.mkdir()
    changed = bytearray((forked.db / name).read_bytes())
    changed[10] ^= 1
    (target / name).write_bytes(changed)  # same name, same size, other content
    prepared = snapshot.prepare(attempt, forked, [target / name])
    uploaded = snapshot.upload(subtask.storage, attempt, prepared, base)
    assert uploaded.files[0].new
    assert uploaded.files[0].path != tables(base)[name]


def test_a_losing_attempts_directory_is_never_opened(subtask):
    base = subtask.epoch(1, None, entries(1))
    won = subtask.epoch(2, base, entries(2, value=b"won!"))
    lost = subtask.epoch(2, base, entries(2, value=b"lost"))
    subtask.remove(subtask.directory(won))
    assert subtask.directory(lost).is_dir()
    assert subtask.read(won) == entries(1) | entries(2, value=b"won!")


@pytest.mark.parametrize("generation", [1, 2], ids=["speculative", "zombie"])
def test_case_18_an_attempt_that_uploads_after_another_one_was_committed_changes_nothing(subtask, generation):
    base = subtask.epoch(1, None, entries(1))
    late = subtask.attempt(2)
    forked = snapshot.working_copy(subtask.storage, late, base)
    backend = RocksDBBackend(forked.db, 16)
    backend.write(list(entries(2, value=b"late").items()))
    files = snapshot.take(late, backend)
    backend.close()
    prepared = snapshot.prepare(late, forked, files)
    won = subtask.epoch(2, base, entries(2, value=b"won!"), generation)
    snapshot.upload(subtask.storage, late, prepared, base)
    for forget in (False, True):
        if forget:
            subtask.forget_local()
        assert subtask.read(won) == entries(1) | entries(2, value=b"won!")
        third = subtask.epoch(3 + forget, won, entries(3), generation)
        assert not any(late.id in file.path for file in third.files)
        assert subtask.read(third) == entries(1) | entries(2, value=b"won!") | entries(3)


def _without_manifest(manifest: Path, first: Snapshot) -> None:
    manifest.unlink()


def _of_another_attempt(manifest: Path, first: Snapshot) -> None:
    manifest.write_text(manifest.read_text().replace(first.attempt, new_attempt_id()))


def _of_another_object(manifest: Path, first: Snapshot) -> None:
    path = first.files[0].path
    manifest.write_text(manifest.read_text().replace(path, path.replace("g1-e1", "g1-e9")))


def _of_another_content(manifest: Path, first: Snapshot) -> None:
    manifest.write_text(manifest.read_text().replace(first.files[0].digest, "0" * 64))


def _cut_off(manifest: Path, first: Snapshot) -> None:
    manifest.write_text(manifest.read_text()[:-9])


@pytest.mark.parametrize(
    "spoil", [_without_manifest, _of_another_attempt, _of_another_object, _of_another_content, _cut_off]
)
def test_local_files_without_their_own_manifest_are_not_used(subtask, spoil):
    first = subtask.epoch(1, None, entries(1))
    directory = subtask.directory(first)
    spoil(directory / "manifest.json", first)
    for path in (directory / "snapshot").glob("*.sst"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert subtask.read(first) == entries(1)


@pytest.mark.parametrize("kind", ["MANIFEST", "CURRENT"])
def test_a_small_local_file_that_rotted_sends_the_whole_fork_to_storage(subtask, kind):
    first = subtask.epoch(1, None, entries(1))
    (small,) = (subtask.directory(first) / "snapshot").glob(f"{kind}*")
    content = bytearray(small.read_bytes())
    content[len(content) // 2] ^= 1
    small.write_bytes(content)
    forked = snapshot.working_copy(subtask.storage, subtask.attempt(2), first)
    assert forked.source is None
    assert subtask.read(first) == entries(1)


def rot(table: Path) -> None:
    """As a disk rots: in place, with no time changed; in the footer, which no cache of RocksDB has."""
    stat, content = table.stat(), bytearray(table.read_bytes())
    content[-1] ^= 1
    with table.open("r+b") as file:
        file.write(content)
    os.utime(table, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("place", ["an object of this host", "another subtask's snapshot"])
def test_rot_in_what_this_host_has_is_healed_although_this_process_has_read_it_before(subtask, tmp_path, place):
    base = subtask.epoch(1, None, entries(1, 2))
    objects = ObjectCache(tmp_path / "work" / "objects", 1 << 30)

    def entries_at(home: Path = subtask.home) -> Entries:
        attempt = replace(subtask.attempt(9), home=home)
        forked = snapshot.working_copy(subtask.storage, attempt, base, objects=objects)
        with snapshot.healing(forked):
            backend = RocksDBBackend(forked.db, 16)
            try:
                return dict(backend.scan(b"", b"\xff" * 9))
            finally:
                backend.close()

    subtask.forget_local()
    assert entries_at() == entries(1, 2), "fetched, and read"
    (table,) = [file for file in base.files if file.name.endswith(".sst")]
    kept = objects.directory / table.digest
    if place == "an object of this host":
        subtask.forget_local()
        rot(kept)
        home = subtask.home
    else:
        kept.unlink()
        home = subtask.home.with_name("1")
        assert entries_at(home) == entries(1, 2), "linked from the first subtask's, and read"
        Subtask.remove(home)
        rot(subtask.directory(base) / "snapshot" / table.name)
    with pytest.raises(TransientError, match="had of the state was damaged and was removed"):
        entries_at(home)
    assert not kept.exists() and not list(subtask.home.glob(f"*-{base.attempt}"))
    assert entries_at(home) == entries(1, 2), "the replay fetches it from storage"
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == table.digest


def test_damage_that_is_not_of_this_host_is_told_as_such(subtask, tmp_path):
    base = subtask.epoch(1, None, entries(1))
    subtask.forget_local()
    objects = ObjectCache(tmp_path / "work" / "objects", 1 << 30)
    forked = snapshot.working_copy(subtask.storage, subtask.attempt(2), base, objects=objects)
    with pytest.raises(DamageError, match="a row that nobody wrote"), snapshot.healing(forked):
        raise DamageError("a row that nobody wrote")
    assert list(objects.directory.glob("?" * 64)), "what is whole is kept"


def test_local_files_that_are_swept_while_they_are_linked_send_the_fork_to_storage(subtask, monkeypatch):
    first = subtask.epoch(1, None, entries(1))
    directory = subtask.directory(first)
    real = snapshot._read_manifest

    def swept_right_after(read: Path):
        data = real(read)
        if directory.exists():
            subtask.remove(directory)
        return data

    monkeypatch.setattr(snapshot, "_read_manifest", swept_right_after)
    forked = snapshot.working_copy(subtask.storage, subtask.attempt(2), first)
    assert forked.source is None
    assert {path.name for path in forked.db.iterdir()} == {file.name for file in first.files}


def _bit_flipped(table: Path, twin: Path) -> None:
    content = bytearray(table.read_bytes())
    content[40] ^= 0x10  # in the first block
    table.write_bytes(content)


def _other_attempts_table(table: Path, twin: Path) -> None:
    assert twin.name == table.name and twin.stat().st_size == table.stat().st_size
    table.write_bytes(twin.read_bytes())


@pytest.mark.parametrize("spoil", [_bit_flipped, _other_attempts_table])
def test_case_22_a_local_table_of_the_right_size_and_other_content_is_found_and_the_replay_fetches(subtask, spoil):
    mine = subtask.epoch(1, None, entries(*range(99), value=b"mine"))
    twin = subtask.epoch(1, None, entries(*range(99), value=b"twin"))
    (table,) = (subtask.directory(mine) / "snapshot").glob("*.sst")
    (other,) = (subtask.directory(twin) / "snapshot").glob("*.sst")
    spoil(table, other)
    forked = snapshot.working_copy(subtask.storage, subtask.attempt(2), mine)
    with pytest.raises(TransientError, match="local copy of the state is damaged"), snapshot.healing(forked):
        backend = RocksDBBackend(forked.db, 16)
        try:
            list(backend.scan(b"", b"\xff"))
        finally:
            backend.close()
    assert not forked.source.exists()
    assert subtask.read(mine) == entries(*range(99), value=b"mine")


def test_damage_in_what_came_from_storage_is_not_called_a_local_one(subtask):
    first = subtask.epoch(1, None, entries(1))
    subtask.forget_local()
    forked = snapshot.working_copy(subtask.storage, subtask.attempt(2), first)
    with pytest.raises(DamageError, match="as it is"), snapshot.healing(forked):
        raise DamageError("as it is")


def test_sweep_keeps_the_base_and_removes_older_epochs_and_lower_generations(subtask):
    attempts = {
        "old": subtask.epoch(1, None, entries(1)),
        "base": subtask.epoch(2, None, entries(2)),
        "lower generation": subtask.epoch(9, None, entries(3)),
        "this epoch": subtask.epoch(5, None, entries(4), generation=2),
        "later": subtask.epoch(6, None, entries(5), generation=2),
    }
    (subtask.home / "notes").mkdir()
    sweep(subtask.attempt(5, generation=2), {attempts["base"].attempt}, (), 1)
    left = {name for name, attempt in attempts.items() if list(subtask.home.glob(f"*-{attempt.attempt}"))}
    assert left == {"base", "this epoch", "later"}
    assert (subtask.home / "notes").is_dir()


def test_sweep_removes_what_a_killed_subtask_has_sorted_and_not_what_one_is_sorting(subtask):
    home = subtask.home.parent.parent
    left = home / f"{SORTING}123-abc"
    with scratch(home, SORTING) as sorting:
        left.mkdir()
        (left / "0.arrow").touch()
        sweep(subtask.attempt(1), (), (), 1)
        assert sorting.is_dir() and not left.exists()


def test_sweep_of_a_subtask_that_never_ran_does_nothing(subtask):
    sweep(subtask.attempt(1), (), (), 1)


# -- restore


def test_lost_local_files_are_fetched_and_still_count_as_inherited(subtask):
    base = subtask.epoch(1, None, entries(1))
    subtask.forget_local()
    second = subtask.epoch(2, base, entries(2))
    assert tables(base).items() <= tables(second).items()
    assert subtask.read(second) == entries(1, 2)


def test_what_was_fetched_once_serves_the_next_attempt(subtask):
    base = subtask.epoch(2, subtask.epoch(1, None, entries(1)), entries(2))
    subtask.forget_local()
    subtask.epoch(3, base, entries(3))  # and the epoch is declined
    for file in subtask.storage.list("state"):
        subtask.storage.delete(file.path)
    sweep(subtask.attempt(4), {base.attempt}, (), 1)
    assert [path.name.rpartition("-")[2] for path in subtask.home.iterdir()] == [base.attempt]
    assert subtask.read(base) == entries(1, 2)


def test_what_was_fetched_takes_the_place_of_what_was_not_to_be_trusted(subtask):
    first = subtask.epoch(1, None, entries(1))
    (table,) = (subtask.directory(first) / "snapshot").glob("*.sst")
    table.write_bytes(b"short")
    assert subtask.read(first) == entries(1)
    table = subtask.directory(first) / "snapshot" / table.name
    assert table.stat().st_size == next(file.bytes for file in first.files if file.name == table.name)
    assert snapshot.working_copy(subtask.storage, subtask.attempt(3), first).source == subtask.directory(first)


def test_what_somebody_begins_anew_when_a_restore_has_ended_is_not_removed(subtask, monkeypatch):
    """Once the fetched snapshot has its name, the name under which it was fetched is free for another process."""
    base = subtask.epoch(1, None, entries(1))
    subtask.forget_local()
    begun = subtask.home / f".restoring-{base.attempt}"
    rename = Path.rename

    def ended(source: Path, target: Path) -> Path:
        settled = rename(source, target)
        if source == begun:
            begun.mkdir()
            (begun / "another's").touch()
        return settled

    monkeypatch.setattr(Path, "rename", ended)
    assert subtask.read(base) == entries(1)
    assert (begun / "another's").exists()


def test_what_was_fetched_goes_if_another_attempt_of_the_epoch_was_faster(subtask, monkeypatch):
    base = subtask.epoch(1, None, entries(1))
    subtask.forget_local()
    rename = Path.rename

    def slower(source: Path, target: Path) -> Path:
        if source.name.startswith(".restoring-"):
            shutil.copytree(source, target)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", slower)
    snapshot.working_copy(subtask.storage, subtask.attempt(2), base)
    assert not list(subtask.home.glob(".restoring-*"))


def test_a_local_file_of_another_size_sends_the_whole_fork_to_storage(subtask):
    base = subtask.epoch(2, subtask.epoch(1, None, entries(1)), entries(2))
    local = sorted((subtask.directory(base) / "snapshot").glob("*.sst"))[-1]
    local.unlink()
    local.write_bytes(b"short")
    assert subtask.read(base) == entries(1, 2)


@pytest.mark.parametrize("how", ["missing", "truncated", "one bit flipped"])
@pytest.mark.parametrize("kind", [".sst", "MANIFEST", "CURRENT"])
def test_a_damaged_object_is_named_when_local_files_are_gone(subtask, how, kind):
    first = subtask.epoch(1, None, entries(1, 2, 3))
    (file,) = [file for file in first.files if kind in file.name]
    spoil(Path(subtask.storage.full(file.path)), how)
    assert subtask.read(first) == entries(1, 2, 3)  # the local files serve
    subtask.forget_local()
    with pytest.raises(DamageError) as raised:
        subtask.read(first)
    assert file.path in str(raised.value.where)


@pytest.mark.parametrize("how", ["missing", "truncated", "one bit flipped"])
def test_case_22_a_table_that_is_damaged_in_storage_is_named_and_older_checkpoints_still_open(subtask, how):
    first = subtask.epoch(1, None, entries(1))
    second = subtask.epoch(2, first, entries(2))
    subtask.forget_local()
    (damaged,) = [file for file in second.files if file.new and file.name.endswith(".sst")]
    spoil(Path(subtask.storage.full(damaged.path)), how)
    with pytest.raises(DamageError) as raised:
        subtask.epoch(3, second, entries(3))
    assert damaged.path in str(raised.value.where)
    assert subtask.read(first) == entries(1)


def spoil(object: Path, how: str) -> None:
    content = bytearray(object.read_bytes())
    object.unlink()
    if how == "truncated":
        object.write_bytes(content[:-1])
    elif how == "one bit flipped":
        content[len(content) // 2] ^= 0x10
        object.write_bytes(content)


@pytest.mark.parametrize("name", ["../000008.sst", "/etc/passwd", "", ".hidden", "a\\b", "a/b.sst"])
def test_hostile_names_from_a_registry_are_refused(subtask, name):
    first = subtask.epoch(1, None, entries(1))
    hostile = replace(first, files=(*first.files, replace(first.files[0], name=name)))
    for local in (True, False):
        if not local:
            subtask.forget_local()
        with pytest.raises(DamageError):
            subtask.read(hostile)


def test_a_hostile_attempt_from_a_registry_is_refused(subtask):
    first = subtask.epoch(1, None, entries(1))
    with pytest.raises(DamageError, match=r"names '\.\./\.\./outside'"):
        subtask.read(replace(first, attempt=AttemptId("../../outside")))


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "state/../../x"])
def test_hostile_paths_from_a_registry_are_refused(subtask, path):
    first = subtask.epoch(1, None, entries(1))
    subtask.forget_local()
    with pytest.raises(DamageError, match="leaves the pipeline's storage root"):
        subtask.read(replace(first, files=(replace(first.files[0], path=path),)))


def test_a_state_that_is_only_looked_at_is_read_where_it_lies(tmp_path):
    subtask = Subtask(tmp_path)
    base = subtask.epoch(1, None, {b"\0\0k%d" % number: bytes(100) for number in range(500)})
    before = {file.path: (subtask.storage.on_disk(file.path) or tmp_path).stat() for file in base.files}
    target = tmp_path / "here"
    target.mkdir()
    fetched = snapshot.fetch(subtask.storage, base, target, in_place=True)
    tables = [file for file in base.files if file.name.endswith(".sst")]
    assert tables and all((target / file.name).is_symlink() for file in tables)
    assert (fetched.local, fetched.stored) == (
        sum(file.bytes for file in tables), sum(file.bytes for file in base.files if file not in tables),
    )  # fmt: skip
    backend = RocksDBBackend(target, 16)
    assert len(dict(backend.scan(b"", b"\xff" * 9))) == 500
    backend.write([(b"\0\0more", b"")])
    backend.snapshot(tmp_path / "again")
    backend.close()
    shutil.rmtree(target)
    after = {file.path: (subtask.storage.on_disk(file.path) or tmp_path).stat() for file in base.files}
    assert {path: stat.st_ctime_ns for path, stat in after.items()} == {
        path: stat.st_ctime_ns for path, stat in before.items()
    }, "not even a link was made to them"


def test_damage_in_a_state_that_is_read_where_it_lies_is_found(tmp_path):
    subtask = Subtask(tmp_path)
    base = subtask.epoch(1, None, {b"\0\0k%d" % number: os.urandom(100) for number in range(5000)})
    (table,) = [file for file in base.files if file.name.endswith(".sst")]
    there = subtask.storage.on_disk(table.path)
    assert there is not None
    data = bytearray(there.read_bytes())
    data[len(data) // 2] ^= 1
    there.write_bytes(data)
    target = tmp_path / "here"
    target.mkdir()
    snapshot.fetch(subtask.storage, base, target, in_place=True)
    backend = RocksDBBackend(target, 16)
    with pytest.raises(DamageError, match="cannot read its state"):
        list(backend.scan(b"", b"\xff" * 9))
    backend.close()
    there.write_bytes(data[:-1])
    (tmp_path / "other").mkdir()
    with pytest.raises(DamageError, match="altered"):
        snapshot.fetch(subtask.storage, base, tmp_path / "other", in_place=True)
