"""Restore, rescale and the first epoch after a kill: beside plainly copying the same bytes.

    python -m benchmarks.restore                     states of 1 and 5 GB, 10M keys; a quarter of an hour and 20 GB of disk
    python -m benchmarks.restore --sizes 0.2 --keys 500000 --reps 1 --results /tmp/restore

No Spark: a running count of keys with values of 1 KB (for the sizes), or of 8-byte keys (for rescaling), in a real pipeline of the
runtime in one process. Storage and work directory are on the same local disk. Repetitions alternate, medians count.

- copy: the checkpoint's objects copied file by file into a new directory, in as many threads as a restore uses.
- restore: `restore.restore` on a host that has nothing: fetch, every digest, open, check. again: on the same host, nothing to fetch.
- from the disk: none of the storage's pages are in memory before a copy or a restore, as on a host that takes over. in memory: all are, as
  just after they were written, which is the strictest measure: then a copy is the kernel's alone.
- through a process: a copy whose bytes a process reads and writes, with and without their sha256: what a restore that checks cannot do without.
- rescale: the first, empty epoch at another parallelism, on a host that has nothing; same: the same epoch at the same parallelism.
- first epoch: from the call of `run` to the first report of an epoch of one row, after the work directory is gone or still there.
- increments: restore of checkpoints whose files come from more and more earlier ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from configs import settings as configuration
from configs.settings import Settings
from pipelines.api import Epoch, Pipeline, State, ValueState, files, stage
from pipelines.runtime.execution.in_process import InMemoryExecutor
from pipelines.runtime.inspection import state_reader
from pipelines.runtime.ownership.pipeline_storage import open_storage
from pipelines.runtime.restore import restore
from pipelines.runtime.run.run import RunOptions, run
from state_ops.checkpoints.checkpoint import STATE
from state_ops.storage.store import LOCAL_CHUNK

_ROWS = 250_000
_THREADS = 16


class Blob(State):
    """Of one key."""

    payload: bytes = b""


@stage("blobs", source=files("{landing}/*.parquet", name="landing"), key="id", state=Blob)
def blobs(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001  the signature is Weir's
    """The newest payload of each key."""
    state.put(rows.unique("id", keep="last").select("id", "payload"))
    return rows.clear().select("id")


PIPELINE = Pipeline("restores", (blobs,), max_parallelism=128)


@dataclass(frozen=True)
class Site:
    """One pipeline's storage and landing directory; work directories come and go. payload: bytes of a key's value."""

    root: Path
    keys: int
    payload: int

    def settings(self, work: str = "work", parallelism: int = 4) -> Settings:
        return configuration.load(
            {
                "WEIR_STORAGE__ROOT": str(self.root / "storage"),
                "WEIR_LOCAL__WORK_DIR": str(self.root / work),
                "WEIR_PIPELINES__RESTORES__OBJECT": "benchmarks.restore:PIPELINE",
                "WEIR_PIPELINES__RESTORES__PARAMS": json.dumps({"landing": str(self.root / "landing")}),
                "WEIR_EPOCH__MAX_FILES": "1",
                "WEIR_EPOCH__MAX_BYTES": str(1 << 40),
                "WEIR_CHECKPOINTS__NUM_RETAINED": "200",
                "WEIR_SPARK__PARALLELISM": str(parallelism),
                "WEIR_LOCAL__OBJECTS_MB": "65536",
                "WEIR_RUN__POLL_SECONDS": "0.001",
            }
        )

    def land(self, ids: np.ndarray, seed: int) -> None:
        """One file, which is one epoch."""
        landing = self.root / "landing"
        landing.mkdir(parents=True, exist_ok=True)
        data = np.random.default_rng(seed).bytes(len(ids) * self.payload)
        offsets = np.arange(0, len(ids) * self.payload + 1, self.payload, dtype=np.int64)
        payload = pa.Array.from_buffers(pa.large_binary(), len(ids), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        number = len(list(landing.iterdir()))
        pq.write_table(
            pa.table({"id": ids, "payload": payload.cast(pa.binary())}),
            landing / f"{number:05}.parquet",
            compression="none",
        )

    def fill(self) -> None:
        """Every key once."""
        for start in range(0, self.keys, _ROWS):
            self.land(np.arange(start, min(start + _ROWS, self.keys)), start)
        self.epochs()

    def epochs(self, work: str = "work", parallelism: int = 4) -> list[float]:
        """Read what waits; returns seconds from the call to each report."""
        started, took = time.perf_counter(), []
        options = RunOptions(until_caught_up=True)
        for _ in run(PIPELINE, self.settings(work, parallelism), options, InMemoryExecutor()):
            took.append(time.perf_counter() - started)
        return took

    def forget(self, work: str = "work") -> None:
        shutil.rmtree(self.root / work, ignore_errors=True)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def objects(site: Site) -> list[str]:
    """Where the newest checkpoint's objects are."""
    storage, registry = open_storage(PIPELINE, site.settings())
    head = registry.head()
    assert head is not None
    return [storage.full(file.path) for file in registry.files(head) if file.kind == STATE]


def copied(site: Site, copy: Callable[[str, Path], object] = shutil.copyfile) -> float:
    """The objects of the newest checkpoint, file by file; returns the seconds it took, and leaves nothing."""
    target = site.root / "copy"
    target.mkdir()
    paths = objects(site)
    with ThreadPoolExecutor(_THREADS) as pool:
        took = seconds(lambda: list(pool.map(lambda item: copy(item[1], target / str(item[0])), enumerate(paths))))
    shutil.rmtree(target)
    return took


def through(source: str, target: Path, hashed: bool) -> None:
    """Copy a file's bytes through this process, perhaps with their sha256."""
    seen = hashlib.sha256()
    with Path(source).open("rb") as read, target.open("wb") as written:
        while chunk := read.read(LOCAL_CHUNK):
            if hashed:
                seen.update(chunk)
            written.write(chunk)


def forgotten(paths: Iterable[str]) -> None:
    """Have the kernel keep no page of these files."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def restored(site: Site, work: str) -> restore.Restored:
    storage, registry = open_storage(PIPELINE, site.settings(work))
    head = registry.head()
    assert head is not None
    return restore.restore(PIPELINE, site.settings(work), storage, registry, head)


def of_size(root: Path, gigabytes: float, reps: int) -> dict[str, float]:
    """Copy, restore and first epochs of one size; medians in seconds, and the state's bytes."""
    site = Site(root, int(gigabytes * 1e9 / 1024), 1024)
    site.fill()
    found: dict[str, list[float]] = {}
    size = 0

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    one = np.array([0])
    for rep in range(reps):
        forgotten(objects(site))
        note("copy from the disk", copied(site))
        forgotten(objects(site))
        site.forget("fresh")
        note("restore from the disk", seconds(lambda: restored(site, "fresh")))
        note("through a process", copied(site, partial(through, hashed=False)))
        note("with sha256", copied(site, partial(through, hashed=True)))
        note("copy", copied(site))
        site.forget("fresh")
        clock = time.perf_counter()
        size = restored(site, "fresh").bytes_total
        note("restore", time.perf_counter() - clock)
        note("again", seconds(lambda: restored(site, "fresh")))
        site.land(one, rep)
        note("first epoch, local files", site.epochs("fresh")[0])
        site.forget("fresh")
        site.land(one, rep)
        note("first epoch, nothing local", site.epochs("fresh")[0])
    return {"bytes": size, **{name: statistics.median(took) for name, took in found.items()}}


def digest(site: Site) -> tuple[int, int]:
    """How many keys there are and the sum of their rows' hashes, but for the one that every epoch changes."""
    rows, total = 0, np.uint64(0)
    for table in state_reader.scan(PIPELINE, site.settings(), "blobs"):
        frame = pl.DataFrame(table).filter(pl.col("id") > 0)
        rows += len(frame)
        total += frame.hash_rows(seed=1).to_numpy().sum(dtype=np.uint64)
    return rows, int(total)


def rescaled(root: Path, keys: int, reps: int) -> Iterator[dict[str, float | str]]:
    """2 -> 7 -> 3 -> 1 -> 16: the first epoch of each beside that of the same parallelism, on a host that has nothing."""
    site = Site(root, keys, 24)
    for start in range(0, keys, 1_000_000):
        site.land(np.arange(start, min(start + 1_000_000, keys)), start)
    site.epochs("work", 2)
    one, before = np.array([0]), digest(site)
    for was, now in ((2, 7), (7, 3), (3, 1), (1, 16)):
        same, other, local = [], [], []
        base = root.with_name(f"{root.name}-base")
        for _ in range(reps):
            for parallelism, took in ((was, same), (now, other)):
                shutil.rmtree(base, ignore_errors=True)
                shutil.copytree(root / "storage", base)
                site.land(one, len(took))
                site.forget("fresh")
                took.append(site.epochs("fresh", parallelism)[0])
                shutil.rmtree(root / "storage")
                base.rename(root / "storage")
                last = max((root / "landing").iterdir())
                last.unlink()
            local.append(seconds(lambda: (site.forget("fresh"), restored(site, "fresh"))))
        site.land(one, 99)
        site.epochs("fresh", now)
        medians = {
            "same": statistics.median(same),
            "rescale": statistics.median(other),
            "restore": statistics.median(local),
        }
        ratio = medians["rescale"] / medians["same"]
        values = "equal" if digest(site) == before else "WRONG"
        yield {"change": f"{was} -> {now}", **medians, "ratio": ratio, "values": values}


def increments(root: Path, epochs: int) -> Iterator[dict[str, float]]:
    """Restore time by how many earlier checkpoints the newest one's files come from."""
    site = Site(root, 200_000, 256)
    site.fill()
    rng = np.random.default_rng(1)
    for number in range(epochs + 1):
        if number in (0, epochs // 4, epochs // 2, epochs):
            _, registry = open_storage(PIPELINE, site.settings())
            head = registry.head()
            assert head is not None
            sources = {file.path.split("/")[2] for file in registry.files(head) if file.kind == STATE}
            took = []
            for _ in range(3):
                site.forget("fresh")
                took.append(seconds(lambda: restored(site, "fresh")))
            yield {
                "epochs": number,
                "checkpoints named": len(sources),
                "files": head.files,
                "bytes": head.bytes_total,
                "seconds": statistics.median(took),
            }
        site.land(np.unique(rng.integers(0, site.keys, 2_000)), number)
        site.epochs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="1,5", help="GB")
    parser.add_argument("--keys", type=int, default=10_000_000, help="of the rescaled state")
    parser.add_argument("--increments", type=int, default=60, help="epochs")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "restore")
    arguments = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    found: dict[str, object] = {"machine": machine, "reps": arguments.reps}
    sizes: dict[str, dict[str, float]] = {}
    for size in filter(None, arguments.sizes.split(",")):
        with tempfile.TemporaryDirectory(prefix="weir-restore-") as root:
            sizes[size] = of_size(Path(root) / "site", float(size), arguments.reps)
        found["sizes"] = sizes
        write(arguments.results, found)
    if arguments.keys:
        with tempfile.TemporaryDirectory(prefix="weir-restore-") as root:
            found["rescale"] = list(rescaled(Path(root) / "site", arguments.keys, arguments.reps))
        found["keys"] = arguments.keys
        write(arguments.results, found)
    if arguments.increments:
        with tempfile.TemporaryDirectory(prefix="weir-restore-") as root:
            found["increments"] = list(increments(Path(root) / "site", arguments.increments))
        write(arguments.results, found)
    print(arguments.results.with_suffix(".md").read_text())


def write(target: Path, found: dict) -> None:
    lines = ["# Restore", "", f"{found['machine']}, medians of {found['reps']}; `python -m benchmarks.restore`.", ""]
    lines += [
        "| state | storage | copy, s | restore, s | of a copy's rate | through a process, s | with sha256, s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in found.get("sizes", {}).values():
        size, cold, warm = f"{one['bytes'] / 1e9:.2f} GB", "from the disk", one["copy"] / one["restore"]
        copy, restore = one[f"copy {cold}"], one[f"restore {cold}"]
        lines += [
            f"| {size} | {cold} | {copy:.2f} | {restore:.2f} | {copy / restore:.0%} | | |",
            f"| {size} | in memory | {one['copy']:.2f} | {one['restore']:.2f} | {warm:.0%} | {one['through a process']:.2f} | {one['with sha256']:.2f} |",
        ]
    lines += [
        "",
        "| state | restore again, s | first epoch, local files, s | nothing local, s |",
        "|---|---:|---:|---:|",
    ]
    for one in found.get("sizes", {}).values():
        lines.append(
            f"| {one['bytes'] / 1e9:.2f} GB | {one['again']:.2f} | {one['first epoch, local files']:.2f} | {one['first epoch, nothing local']:.2f} |"
        )
    if "rescale" in found:
        lines += ["", f"## Another parallelism, {found['keys']:,} keys", ""]
        lines += [
            "| change | first epoch at the same, s | first epoch at the other, s | ratio | restore, s | every key's value |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for one in found["rescale"]:
            lines.append(
                f"| {one['change']} | {one['same']:.2f} | {one['rescale']:.2f} | {one['ratio']:.2f} | {one['restore']:.2f} | {one['values']} |"
            )
    if "increments" in found:
        lines += ["", "## More and more increments", ""]
        lines += [
            "| epochs | checkpoints whose files are named | files | MB | restore, s |",
            "|---:|---:|---:|---:|---:|",
        ]
        for one in found["increments"]:
            lines.append(
                f"| {one['epochs']} | {one['checkpoints named']} | {one['files']} | {one['bytes'] / 1e6:.0f} | {one['seconds']:.2f} |"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")
    target.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
