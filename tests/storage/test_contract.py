"""What every store must do, run on a local disk and on S3."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError
from obstore.exceptions import GenericError

from state_ops.checkpoints.registry import Registry
from state_ops.errors import ConfigurationError, DamageError
from state_ops.storage.object_store import PART
from state_ops.storage.storage import CancelledError, Storage
from state_ops.storage.store import CHUNK
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint
from tests.storage.conftest import Bucket

Opened = Callable[[], Storage]


@pytest.fixture
def storage(anywhere: Opened) -> Storage:
    return anywhere()


@pytest.mark.parametrize("size", [0, 1, CHUNK, PART, PART + 1, 2 * PART + 12345])
def test_a_file_comes_back_as_it_was_sent(storage: Storage, tmp_path: Path, size: int):
    local, back = tmp_path / "sent", tmp_path / "back"
    local.write_bytes((b"0123456789abcdef" * (size // 16 + 1))[:size])
    digest = hashlib.sha256(local.read_bytes()).hexdigest()

    assert storage.put_file(local, "state/count/g1-e1/0-a/1.sst") == (size, digest)

    assert storage.size("state/count/g1-e1/0-a/1.sst") == size
    storage.get_file("state/count/g1-e1/0-a/1.sst", back, digest=digest)
    assert back.read_bytes() == local.read_bytes() == storage.read_bytes("state/count/g1-e1/0-a/1.sst")


def test_a_part_of_a_file_is_read_alone(storage: Storage):
    storage.put_bytes("exchange/a/1.blocks", bytes(range(100)))
    before = storage.request_counts.counts()["bytes_down"]
    assert storage.read_part("exchange/a/1.blocks", 10, 5) == bytes(range(10, 15))
    assert storage.read_part("exchange/a/1.blocks", 98, 5) == bytes([98, 99])
    assert storage.request_counts.counts()["bytes_down"] - before == 7
    with pytest.raises(FileNotFoundError):
        storage.read_part("exchange/a/2.blocks", 0, 1)


def test_a_file_that_is_written_again_is_the_new_one(storage: Storage):
    storage.put_bytes("coordinator/lease.json", b"first, and longer")
    storage.put_bytes("coordinator/lease.json", b"second")
    assert storage.read_bytes("coordinator/lease.json") == b"second"
    assert [file.path for file in storage.list()] == ["coordinator/lease.json"]


def test_of_two_that_create_a_file_the_second_is_told(storage: Storage):
    assert storage.create("registry/1.json", b"first") is True
    assert storage.create("registry/1.json", b"second") is False
    assert storage.read_bytes("registry/1.json") == b"first"
    assert [file.path for file in storage.list(unfinished=True)] == ["registry/1.json"]


def test_what_is_not_there(storage: Storage, tmp_path: Path):
    assert storage.read_bytes("a/b") is None and storage.size("a/b") is None and storage.size("a") is None
    assert list(storage.list("a")) == [] and storage.list_dirs("a") == [] and storage.delete_tree("a") == 0
    storage.delete("a/b")
    with pytest.raises(DamageError, match="missing from storage"):
        storage.get_file("a/b", tmp_path / "b")


def test_another_content_than_recorded_is_damage(storage: Storage, tmp_path: Path):
    storage.put_bytes("a/b", b"what somebody made of it")
    with pytest.raises(DamageError, match="altered or truncated"):
        storage.get_file("a/b", tmp_path / "b", digest=hashlib.sha256(b"what Weir wrote").hexdigest())


def test_listings_name_files_below_and_directories_beside(storage: Storage):
    paths = [
        "state/a/g1-e1/0-x/1.sst",
        "state/a/g1-e1/0-x/2.sst",
        "state/a/g2-e9/0-y/1.sst",
        "state/ab/g1-e1/0-z/1.sst",
    ]
    for number, path in enumerate(paths):
        storage.put_bytes(path, b"x" * number)

    assert {file.path: file.bytes for file in storage.list("state/a")} == {paths[0]: 0, paths[1]: 1, paths[2]: 2}
    assert sorted(file.path for file in storage.list()) == sorted(paths)
    assert sorted(storage.list_dirs("state")) == ["a", "ab"]
    assert sorted(storage.list_dirs("state/a")) == ["g1-e1", "g2-e9"]
    assert storage.list_dirs("state/a/g1-e1/0-x") == []
    assert storage.list_dirs("") == ["state"]


def test_a_tree_goes_and_what_only_begins_like_it_stays(storage: Storage):
    for path in ("channels/a/g1-e1/0.parquet", "channels/a/g1-e1/1.parquet", "channels/a/g1-e10/0.parquet"):
        storage.put_bytes(path, b"x")
    assert storage.delete_tree("channels/a/g1-e1") == 2
    assert storage.list_dirs("channels/a") == ["g1-e10"]
    assert storage.delete("channels/a/g1-e10/0.parquet") is True
    assert list(storage.list()) == [] and storage.list_dirs("") == [], "no empty directories are left to pile up"


def test_a_footer_is_read_from_the_end_alone(storage: Storage):
    wide = pa.table({f"column {number} {'x' * 200}": [1, 2, 3] for number in range(600)})  # its footer is not small
    data = pa.BufferOutputStream()
    pq.write_table(wide, data)
    storage.put_bytes("tables/out/data/1.parquet", data.getvalue())
    footer, size = storage.parquet_end("tables/out/data/1.parquet")
    assert (footer.num_rows, footer.num_columns, size) == (3, 600, data.getvalue().size)
    small = pa.BufferOutputStream()
    pq.write_table(wide.select([0]).slice(0, 1), small)
    storage.put_bytes("tables/out/data/3.parquet", small.getvalue())
    assert storage.parquet_end("tables/out/data/3.parquet")[1] == len(small.getvalue())
    storage.put_bytes("tables/out/data/2.parquet", b"PAR1")
    with pytest.raises(pa.ArrowException):
        storage.parquet_footer("tables/out/data/2.parquet")


@pytest.mark.parametrize("end", [b"", b"garbled!" + (8).to_bytes(4, "little") + b"PAR1"])
def test_what_is_no_footer_is_no_fault_of_the_storage(storage: Storage, end: bytes):
    storage.put_bytes("tables/out/data/1.parquet", b"PAR1" + end if end else b"")
    with pytest.raises(pa.ArrowException):
        storage.parquet_end("tables/out/data/1.parquet")


def test_an_empty_object_has_no_last_bytes(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """S3 itself answers 416, which the tests' server does not."""
    storage = bucket.storage()
    storage.put_bytes("empty", b"")
    storage.put_bytes("full", b"PAR1")

    def refused(*_: object, **__: object) -> None:
        raise GenericError("Server returned non-2xx status code: 416 Range Not Satisfiable: <Code>InvalidRange</Code>")

    monkeypatch.setattr(obstore, "get", refused)
    with pytest.raises(pa.ArrowException):
        storage.parquet_end("empty")
    with pytest.raises(OSError, match="416 InvalidRange"):
        storage.parquet_end("full")


def test_a_cancelled_upload_stops_at_the_next_chunk_and_nothing_is_visible(storage: Storage, tmp_path: Path):
    local = tmp_path / "big"
    local.write_bytes(bytes(2 * PART))

    class AtThird(threading.Event):
        """Set when it is looked at for the third time."""

        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks >= 3

    cancelled = AtThird()
    with pytest.raises(CancelledError):
        storage.put_file(local, "state/a/g1-e1/0-x/1.sst", cancelled=cancelled)
    assert cancelled.looks == 3
    assert list(storage.list(unfinished=True)) == []
    storage.put_file(local, "state/a/g1-e1/0-x/1.sst")
    cancelled.looks = 1
    with pytest.raises(CancelledError):
        storage.get_file("state/a/g1-e1/0-x/1.sst", tmp_path / "back", cancelled=cancelled)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../other/registry", "a/../../b", "a\\b", "s3://other/key", "a\0b", ""]
)
def test_paths_that_leave_the_root_are_refused_by_every_operation(storage: Storage, tmp_path: Path, path: str):
    local = tmp_path / "local"
    local.write_bytes(b"x")
    operations: list[Callable[[], object]] = [
        lambda: storage.put_file(local, path),
        lambda: storage.put_bytes(path, b"x"),
        lambda: storage.create(path, b"x"),
        lambda: storage.get_file(path, tmp_path / "back"),
        lambda: storage.read_bytes(path),
        lambda: storage.parquet_footer(path),
        lambda: storage.size(path),
        lambda: storage.delete(path),
        lambda: storage.delete_tree(path),
        lambda: storage.full(path),
        lambda: storage.below(path),
    ]
    if path:  # an empty path is the root itself, where listings begin
        operations += [lambda: list(storage.list(path)), lambda: storage.list_dirs(path)]
    for operation in operations:
        with pytest.raises(DamageError, match="leaves the pipeline's storage root"):
            operation()


def test_storage_travels_to_another_process_by_its_references(storage: Storage):
    storage.put_bytes("a/b", b"here")
    shipped = pickle.dumps(storage)
    assert b"test-secret" not in shipped and b"test-key" not in shipped
    assert pickle.loads(shipped).below("a").read_bytes("b") == b"here"


def test_links_that_lead_out_of_the_root_are_not_followed(tmp_path: Path):
    """On resolved paths: the registry's text may look harmless."""
    outside = tmp_path / "outside"
    (outside / "g1-e1").mkdir(parents=True)
    (outside / "g1-e1" / "1.sst").write_bytes(b"another's")
    (outside / "secret").write_bytes(b"another's")
    storage = Storage(str(tmp_path / "flights"))
    storage.put_bytes("state/count/g2-e2/1.sst", b"ours")
    root = tmp_path / "flights"
    (root / "state" / "link").symlink_to(outside)
    (root / "state" / "file").symlink_to(outside / "secret")
    (root / "state" / "dangling").symlink_to(outside / "not there")
    (root / "inside").symlink_to(root / "state" / "count")
    for path in ("state/link/g1-e1/1.sst", "state/file", "state/dangling"):
        operations: list[Callable[[], object]] = [
            lambda path=path: storage.put_file(outside / "secret", path),
            lambda path=path: storage.put_bytes(path, b"x"),
            lambda path=path: storage.create(path, b"x"),
            lambda path=path: storage.get_file(path, tmp_path / "back"),
            lambda path=path: storage.read_bytes(path),
            lambda path=path: storage.parquet_footer(path),
            lambda path=path: storage.size(path),
            lambda path=path: storage.list(path),
            lambda path=path: storage.list_dirs(path),
            lambda path=path: storage.delete(path),
            lambda path=path: storage.delete_tree(path),
        ]
        for operation in operations:
            with pytest.raises(DamageError, match="through a link"):
                operation()
    assert storage.delete_tree("state") >= 1
    assert (outside / "g1-e1" / "1.sst").read_bytes() == (outside / "secret").read_bytes() == b"another's"
    assert sorted(file.name for file in outside.iterdir()) == ["g1-e1", "secret"]


@pytest.mark.parametrize("uri", ["{}/a%20b", "file://{}/a%2520b/flights"])
def test_a_root_below_which_delta_cannot_open_tables_is_refused_by_name(tmp_path, uri):
    with pytest.raises(ConfigurationError, match="a percent sign and two hex digits") as refused:
        Storage(uri.format(tmp_path))
    assert "%" in str(refused.value.where) and "Rename" in str(refused.value.next)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spelled", ["{}", "file://{}"], ids=["path", "uri"])
@pytest.mark.parametrize("escapes", [0, 1, 2])
def test_why_such_a_root_is_refused(tmp_path, spelled, escapes):
    """delta-rs writes below one decoding of the path, and its kernel reads below another. As a URI that is not escaped
    both agree, on another directory. Once this fails, the refusal can go."""
    root = tmp_path / "a%20b" / "table"
    root.mkdir(parents=True)
    written = str(root)
    for _ in range(escapes):
        written = quote(written)
    with suppress(DeltaError, OSError):
        write_deltalake(spelled.format(written), pa.table({"x": [1]}))
        assert not list(root.rglob("*.json")), "it was written where it was meant to be, and could be read"


@pytest.mark.parametrize("name", ["a b", "50%", "x#y", "x?y", "ü+&"])
def test_a_root_of_other_characters_works(tmp_path, name):
    storage = Storage(str(tmp_path / name))
    registry = Registry(storage, APP)
    generation = registry.take_over()
    registry.commit(a_checkpoint(1, None, []), [])
    assert Registry(Storage(str(tmp_path / name)), APP).generation() == generation
    assert [row.id for row in Registry(storage, APP).checkpoints()] == [1]
    assert [file.name for file in tmp_path.iterdir()] == [name]
