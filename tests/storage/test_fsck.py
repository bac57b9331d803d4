"""fsck on a local disk and on S3: the same findings, the same repair."""

from __future__ import annotations

from dataclasses import replace

from state_ops.checkpoints.registry import Registry
from state_ops.fsck.check import check
from state_ops.fsck.findings import Kind
from state_ops.fsck.repair import carry_out, plan_repair
from state_ops.records.snapshot_files import STATE
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint, a_file

ATTEMPT = "a" * 32


def test_damage_and_leftovers_are_found_and_only_leftovers_go(anywhere, tmp_path):
    storage = anywhere()
    registry = Registry(storage, APP)
    generation = registry.take_over()
    files = []
    for number in range(3):
        local = tmp_path / f"{number}.sst"
        local.write_bytes(bytes([number]) * 1000)
        path = f"state/counts/g1-e1/0-{ATTEMPT}/{number}.sst"
        size, digest = storage.put_file(local, path)
        files.append(replace(a_file(local.name, ATTEMPT, kind=STATE), path=path, bytes=size, digest=digest))
    registry.commit(a_checkpoint(1, None, files, sinks={}), files)
    assert check(storage, APP, [], alive=False).findings == ()

    storage.put_bytes(files[0].path, b"\1" * 1000)
    storage.delete(files[1].path)
    storage.put_bytes(f"state/counts/g0-e1/0-{ATTEMPT}/9.sst", b"x")
    storage.put_bytes("notes.txt", b"x")
    report = check(storage, APP, [], alive=False, owned=True)
    assert [(finding.kind, finding.path) for finding in report.findings] == [
        (Kind.MISSING_OBJECT, files[1].path),
        (Kind.ALTERED_OBJECT, files[0].path),
        (Kind.ORPHAN_OBJECT, f"state/counts/g0-e1/0-{ATTEMPT}/9.sst"),
        (Kind.FOREIGN_FILE, "notes.txt"),
    ]
    assert report.read == 2000
    carry_out(storage, registry, generation, plan_repair(report))
    left = check(storage, APP, [], alive=False)
    assert [finding.kind for finding in left.findings] == [Kind.MISSING_OBJECT, Kind.ALTERED_OBJECT, Kind.FOREIGN_FILE]
