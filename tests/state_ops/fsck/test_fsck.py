"""What fsck concludes from a registry whose rows and listings do not fit each other, and how it is bounded and
fenced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.delta import fenced_table
from state_ops.delta.fenced_table import DataFile
from state_ops.errors import FencedError
from state_ops.fsck.check import check
from state_ops.fsck.findings import MEANINGS, Finding, Kind, Report, Severity
from state_ops.fsck.repair import RepairPlan, agreed, carry_out, plan_repair
from state_ops.fsck.survey import chain_problems
from state_ops.ids import Generation
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import CHANNEL, StateFile
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint, a_file, published

PROJECT = Path(__file__).parents[3]
ATTEMPT = "a" * 32


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


@pytest.fixture
def registry(storage: Storage) -> Registry:
    opened = Registry(storage, APP)
    opened.take_over()
    return opened


def a_state_file(name: str, size: int = 10) -> StateFile:
    file = a_file(name, ATTEMPT, size=size)
    return replace(file, path=f"state/counts/g1-e1/0-{ATTEMPT}/{name}")


def complete(registry: Registry, storage: Storage, id: int, files: Sequence[StateFile], **other) -> Checkpoint:
    """A checkpoint of state alone, whose objects are there."""
    for file in files:
        storage.put_bytes(file.path, b"x" * file.bytes)
    checkpoint = a_checkpoint(id, id - 1 or None, files, **{"sinks": {}, **other})
    registry.commit(checkpoint, files)
    return checkpoint


def look(storage: Storage) -> Report:
    return check(storage, APP, [], alive=False, quick=True)


def kinds(report: Report) -> list[Kind]:
    return [finding.kind for finding in report.findings]


# -- rows against listings


def test_a_listing_with_a_file_less_is_damage_that_stops_everything(storage, registry):
    files = [a_state_file("1"), a_state_file("2")]
    registry.commit(a_checkpoint(1, None, files, sinks={}), files[:1])
    report = look(storage)
    assert kinds(report)[0] is Kind.DAMAGED_LISTING and "2 files, but 1 is listed" in report.findings[0].what
    assert plan_repair(report).refused and plan_repair(report).empty
    assert [checkpoint.intact for checkpoint in report.checkpoints] == [False]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bytes_total": 21}, "bytes_total = 21, its listing adds up to 20"),
        ({"bytes_new": 19}, "bytes_new = 19"),
        ({"operators": {"counts": OperatorStats.from_json({"files_total": 3})}}, "operators.counts.files_total = 3"),
        ({"operators": {"counts": OperatorStats.from_json({"files_new": 1})}}, "operators.counts.files_new = 1"),
        ({"operators": {"counts": OperatorStats.from_json({"bytes_total": 1})}}, "operators.counts.bytes_total = 1"),
        ({"sinks": {"out": SinkLink(1, None)}}, "has output for out"),
    ],
)
def test_figures_that_do_not_add_up_are_named(storage, registry, wrong, says):
    complete(registry, storage, 1, [a_state_file("1"), a_state_file("2")], **wrong)
    drift = [finding for finding in look(storage).findings if finding.kind is Kind.COUNT_DRIFT]
    assert len(drift) == 1 and says in drift[0].what
    assert drift[0].blocks


def test_the_first_checkpoint_of_a_pipeline_that_started_from_anothers_has_that_ones_figures(storage, registry):
    figures = {"counts": OperatorStats(files_total=1, files_new=0, bytes_total=10, bytes_new=0)}
    complete(registry, storage, 1, [a_state_file("1")], kind="start", operators=figures)
    assert look(storage).findings == ()


def test_totals_follow_from_the_parent(storage, registry):
    complete(registry, storage, 1, [a_state_file("1")], totals={"bytes_new": 10})
    complete(registry, storage, 2, [a_state_file("2")], totals={"bytes_new": 25})
    assert ["total of 25 new bytes; 1 and its own make 20" in finding.what for finding in look(storage).findings] == [
        True
    ]


def test_one_object_under_two_digests_is_damage(storage, registry):
    complete(registry, storage, 1, [a_state_file("1")])
    complete(registry, storage, 2, [replace(a_state_file("1"), digest="another", new=False)])
    report = look(storage)
    assert kinds(report) == [Kind.DAMAGED_LISTING] and report.findings[0].checkpoints == (1, 2)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/state/x", "coordinator/lease.json", "tables/out/x"])
def test_a_listing_that_names_what_is_no_state_file_is_damage(storage, registry, path):
    hostile = replace(a_state_file("1"), path=path)
    registry.commit(a_checkpoint(1, None, [hostile], sinks={}), [hostile])
    report = look(storage)
    assert Kind.DAMAGED_LISTING in kinds(report) and plan_repair(report).refused


def test_a_channel_is_needed_like_state(storage, registry):
    channel = replace(a_state_file("1"), kind=CHANNEL, path=f"channels/counts/g1-e1/0-{ATTEMPT}.parquet")
    complete(registry, storage, 1, [channel], bytes_total=0, bytes_new=0)
    assert look(storage).findings == ()
    storage.delete(channel.path)
    assert kinds(look(storage)) == [Kind.MISSING_OBJECT]


def test_a_publication_of_a_checkpoint_that_is_not_there_is_left_over(storage, registry):
    complete(registry, storage, 7, [a_state_file("1")], parent_id=None)
    registry.record_publications(Generation(1), [published(6)])
    report = look(storage)
    assert kinds(report) == [Kind.STRAY_PUBLICATION]
    carry_out(storage, registry, Generation(1), plan_repair(report))
    assert look(storage).findings == ()


# -- the chain


def rows(*ids: tuple[int, int | None], generation: int = 1) -> list[Checkpoint]:
    return [a_checkpoint(id, parent, generation=generation) for id, parent in ids]


def test_gaps_that_pruning_leaves_are_no_damage():
    assert list(chain_problems(rows((3, 2), (9, 8), (10, 9), (14, 10)), Generation(1))) == []


@pytest.mark.parametrize(
    ("chain", "says"),
    [
        (rows((1, None), (1, None)), "two checkpoints 1"),
        (rows((1, None), (2, None)), "continues None, although 1"),
        (rows((1, None), (2, 1), (3, 1)), "continues 1, although 2"),
        (rows((2, 2)), "continues 2, which is not older"),
        (rows((2, 5)), "continues 5, which is not older"),
        (rows((1, None), generation=3), "generation 3; the newest is 2"),
        (rows((1, None), generation=2) + rows((2, 1)), "older generation than 1"),
    ],
)
def test_a_chain_that_cannot_have_come_to_be_is_damage(chain, says):
    problems = list(chain_problems(chain, Generation(2)))
    assert problems and says in problems[0].what and problems[0].kind is Kind.BROKEN_CHAIN and problems[0].blocks


# -- the registry's own tables


def test_a_registry_without_pins_is_of_an_older_release(storage, registry):
    complete(registry, storage, 1, [a_state_file("1")])
    storage.delete_tree("registry/pins")
    assert look(storage).findings == ()


@pytest.mark.parametrize("lost", ["checkpoints", "state_files", "publications"])
def test_a_registry_that_lost_a_table_is_damage(storage, registry, lost):
    complete(registry, storage, 1, [a_state_file("1")])
    storage.delete_tree(f"registry/{lost}")
    report = look(storage)
    assert Kind.REGISTRY_SET_BACK in kinds(report) and plan_repair(report).refused
    assert not any(finding.repair for finding in report.findings if finding.kind is Kind.ORPHAN_OBJECT)


# -- who may, and what else


def test_a_fenced_owner_deletes_nothing(storage, registry):
    complete(registry, storage, 1, [])
    storage.put_bytes(f"state/counts/g1-e9/0-{ATTEMPT}/1.sst", b"x")
    plan = plan_repair(look(storage))
    assert len(plan.delete) == 1
    Registry(storage, APP).take_over()
    with pytest.raises(FencedError, match="newer coordinator"):
        carry_out(storage, registry, Generation(1), plan)
    assert storage.size(plan.delete[0].path or "") == 1


def test_case_9_what_the_living_generation_stages_is_never_an_orphan(storage, registry):
    complete(registry, storage, 1, [])
    names = [f"g{number}-e5/0-{ATTEMPT}" for number in (0, 1, 2)]
    for number, name in enumerate(names):
        storage.put_bytes(f"registry/.probe-g{number}-{ATTEMPT}/put", b"x")
        storage.put_bytes(f"state/counts/{name}/1.sst", b"x")
        storage.put_bytes(f"channels/counts/{name}.parquet", b"x")
        storage.put_bytes(f"exchange/counts/{name}/1.blocks", b"x")

    def orphans(**who: bool) -> set[str]:
        report = check(storage, APP, [], quick=True, **who)
        kept = Kind.ORPHAN_OBJECT, Kind.PROBE
        assert not [finding for finding in report.findings if finding.kind not in kept], "nothing is foreign"
        probes = {(finding.path or "").split("-")[1] for finding in report.findings if finding.kind is Kind.PROBE}
        orphans = {
            (finding.path or "").split("/")[2] for finding in report.findings if finding.kind is Kind.ORPHAN_OBJECT
        }
        assert probes == {name.partition("-")[0] for name in orphans}, "a probe may be a taker's that is at work"
        return orphans

    assert orphans(alive=True) == {"g0-e5"}, "generation 1 lives"
    assert orphans(alive=False, owned=True) == {"g0-e5"}, "generation 1 is ours"
    assert orphans(alive=False) == {"g0-e5", "g1-e5"}, "whoever repairs claims generation 2 first"


def test_only_what_was_shown_is_repaired():
    first, other = (Finding.of(Kind.ORPHAN_OBJECT, "", path) for path in ("state/1", "state/2"))
    shown, fresh = RepairPlan(delete=(first,)), RepairPlan(delete=(first, other))
    assert agreed(fresh, shown).delete == (first,)
    assert agreed(RepairPlan(delete=(other,)), shown).empty
    assert agreed(fresh, None) == fresh


def test_storage_that_does_not_answer_is_no_finding(storage, registry, monkeypatch):
    """An error is raised: nothing may be concluded, and deleted, from half a listing."""
    complete(registry, storage, 1, [a_state_file("1")])

    def fails(self, path="", *, unfinished=False):
        raise OSError("the store is gone")

    monkeypatch.setattr(Storage, "list", fails)
    with pytest.raises(OSError, match="the store is gone"):
        look(storage)


def test_published_rows_that_another_writer_put_beside_ours_are_looked_at_too(storage, registry):
    """Part of a table by its log, though of no name that Weir gives."""
    schema = pa.schema([("id", pa.int64())])
    fenced_table.ensure_table(storage, "tables/out", schema)
    complete(registry, storage, 1, [])
    fenced_table.commit(fenced_table.open_table(storage, "tables/out"), "x", 1, [DataFile("part-0.parquet", 5, 1)])
    report = check(storage, APP, ["out"], alive=False)
    assert [(finding.kind, finding.path) for finding in report.findings] == [
        (Kind.MISSING_ROWS, "tables/out/part-0.parquet")
    ]
    storage.put_bytes("tables/out/part-0.parquet", b"12345")
    report = check(storage, APP, ["out"], alive=False)
    assert [(finding.kind, finding.path) for finding in report.findings] == [
        (Kind.ALTERED_ROWS, "tables/out/part-0.parquet")
    ]
    assert kinds(check(storage, APP, ["out"], alive=False, quick=True)) == []


@pytest.mark.long
def test_many_objects_are_checked_in_seconds(storage, registry, monkeypatch):
    """The listing of a large store is stood in for: what is timed is the check, not a disk."""
    from state_ops.storage.store import StoredFile

    count = 20_000
    files = [a_state_file(f"{number:06}.sst") for number in range(count)]
    registry.commit(a_checkpoint(1, None, files, sinks={}), files)
    real = Storage.list
    stored = [StoredFile(file.path, file.bytes) for file in files[:-1]]

    def listed(self, path="", *, unfinished=False):
        yield from real(self, path, unfinished=unfinished)
        if not path:
            yield from stored

    monkeypatch.setattr(Storage, "list", listed)
    started = time.process_time()
    report = look(storage)
    took = time.process_time() - started
    assert [finding.path for finding in report.findings] == [files[-1].path]
    assert report.files >= count - 1 and took < 10, took


def test_every_kind_is_described_for_people():
    text = (PROJECT / "docs/how-to/fsck.md").read_text()
    missing = [kind for kind in Kind if f"`{kind}`" not in text]
    assert not missing
    assert MEANINGS.keys() == set(Kind)
    for kind, meaning in MEANINGS.items():
        line = next(line for line in text.splitlines() if f"| `{kind}` |" in line)
        assert ("yes" in line.split("|")[2]) == meaning.blocks or meaning.severity is not Severity.DAMAGE, kind
