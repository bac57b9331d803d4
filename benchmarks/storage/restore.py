"""Restore, rescale and the first epoch after a kill: beside plainly copying the same bytes.

    python -m benchmarks.storage.restore      states of 1 and 5 GB, 10M keys; a quarter of an hour and 20 GB of disk
    python -m benchmarks.storage.restore --sizes 0.2 --keys 500000 --reps 1 --results /tmp/restore

No Spark: a running count of keys with values of 1 KB (for the sizes), or of 8-byte keys (for rescaling), in a real
pipeline of the runtime in one process. Storage and work directory are on the same local disk. Repetitions alternate,
medians count.

- copy: the checkpoint's objects copied file by file into a new directory, in as many threads as a restore uses.
- restore: `restore.restore` on a host that has nothing: fetch, every digest, open, check. again: on the same host,
  nothing to fetch.
- from the disk: none of the storage's pages are in memory before a copy or a restore, as on a host that takes over. in
  memory: all are, as just after they were written, which is the strictest measure: then a copy is the kernel's alone.
- through a process: a copy whose bytes a process reads and writes, with and without their sha256: what a restore that
  checks cannot do without.
- rescale: the first, empty epoch at another parallelism, on a host that has nothing; same: the same epoch at the same
  parallelism.
- first epoch: from the call of `run` to the first report of an epoch of one row, after the work directory is gone or
  still there.
- increments: restore of checkpoints whose files come from more and more earlier ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import harness
from benchmarks.harness import Row, seconds
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import STATE, StateFile
from state_ops.storage.store import LOCAL_CHUNK
from weir import Epoch, Pipeline, State, ValueState, files, stage
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.ownership.pipeline_storage import open_storage
from weir.restore import restore
from weir.settings.configuration import Settings

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
        return harness.local_settings(
            self.root,
            PIPELINE.name,
            self.root / "landing",
            local={"work_dir": str(self.root / work), "objects_mb": 65536},
            epoch={"max_files": 1, "max_bytes": 1 << 40},
            checkpoints={"num_retained": 200},
            spark={"parallelism": parallelism},
            run={"poll_seconds": 0.001},
        )

    def head(self) -> Checkpoint:
        """The newest checkpoint."""
        head = open_storage(PIPELINE, self.settings())[1].head()
        assert head is not None
        return head

    def state_files(self) -> list[StateFile]:
        """The newest checkpoint's files of state."""
        _, registry = open_storage(PIPELINE, self.settings())
        return [file for file in registry.files(self.head()) if file.kind == STATE]

    def restore(self, work: str = "fresh") -> restore.Restored:
        """Restore the newest checkpoint into a work directory."""
        settings = self.settings(work)
        return restore.restore(PIPELINE, settings, *open_storage(PIPELINE, settings), self.head())

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

    def fill(self, rows: int = _ROWS, parallelism: int = 4) -> None:
        """Every key once, in files of so many rows."""
        for start in range(0, self.keys, rows):
            self.land(np.arange(start, min(start + rows, self.keys)), start)
        self.epochs("work", parallelism)

    def epochs(self, work: str = "work", parallelism: int = 4) -> float:
        """Read what waits. Returns seconds from the call to the first report."""
        epochs = list(harness.epochs(PIPELINE, self.settings(work, parallelism), InMemoryExecutor()))
        return epochs[0].wall / 1e3

    def forget(self, work: str = "fresh") -> None:
        """Remove a work directory."""
        shutil.rmtree(self.root / work, ignore_errors=True)


def copied(site: Site, copy: Callable[[str, Path], object] = shutil.copyfile) -> float:
    """The objects of the newest checkpoint, file by file; returns the seconds it took, and leaves nothing."""
    target = site.root / "copy"
    target.mkdir()
    paths = objects(site)
    with ThreadPoolExecutor(_THREADS) as pool:
        took = seconds(lambda: list(pool.map(lambda item: copy(item[1], target / str(item[0])), enumerate(paths))))
    shutil.rmtree(target)
    return took


def objects(site: Site) -> list[str]:
    """Where the newest checkpoint's objects are."""
    storage, _ = open_storage(PIPELINE, site.settings())
    return [storage.full(file.path) for file in site.state_files()]


def through(source: str, target: Path, hashed: bool) -> None:
    """Copy a file's bytes through this process, perhaps with their sha256."""
    seen = hashlib.sha256()
    with Path(source).open("rb") as read, target.open("wb") as written:
        while chunk := read.read(LOCAL_CHUNK):
            if hashed:
                seen.update(chunk)
            written.write(chunk)


def forget_pages(site: Site) -> None:
    """Have the kernel keep no page of the newest checkpoint's objects."""
    for path in objects(site):
        with Path(path).open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def of_size(root: Path, gigabytes: float, reps: int) -> Row:
    """Copy, restore and first epochs of one size; medians in seconds, and the state's bytes."""
    site = Site(root / "site", int(gigabytes * 1e9 / 1024), 1024)
    site.fill()
    figures: dict[str, list[float]] = defaultdict(list)
    for rep in range(reps):
        forget_pages(site)
        figures["copy from the disk"].append(copied(site))
        forget_pages(site)
        site.forget()
        figures["restore from the disk"].append(seconds(site.restore))
        figures["through a process"].append(copied(site, partial(through, hashed=False)))
        figures["with sha256"].append(copied(site, partial(through, hashed=True)))
        figures["copy"].append(copied(site))
        site.forget()
        figures["restore"].append(seconds(site.restore))
        figures["again"].append(seconds(site.restore))
        for name in ("first epoch, local files", "first epoch, nothing local"):
            site.land(np.array([0]), rep)
            figures[name].append(site.epochs("fresh"))
            site.forget()
    return {"bytes": site.head().bytes_total, **harness.medians_of(figures)}


def digest(site: Site) -> tuple[int, int]:
    """How many keys there are and the sum of their rows' hashes, but for the one that every epoch changes."""
    rows, total = 0, np.uint64(0)
    for table in state_reader.scan(PIPELINE, site.settings(), "blobs"):
        frame = pl.DataFrame(table).filter(pl.col("id") > 0)
        rows += len(frame)
        total += frame.hash_rows(seed=1).to_numpy().sum(dtype=np.uint64)
    return rows, int(total)


def rescaled(root: Path, keys: int, reps: int) -> list[Row]:
    """2 -> 7 -> 3 -> 1 -> 16: the first epoch of each beside that of the same parallelism, on a host that has
    nothing."""
    site = Site(root / "site", keys, 24)
    site.fill(1_000_000, 2)
    storage, base = site.root / "storage", root / "base"
    before = digest(site)
    rows: list[Row] = []
    for was, now in ((2, 7), (7, 3), (3, 1), (1, 16)):
        times: dict[str, list[float]] = {"same": [], "rescale": [], "restore": []}
        for rep in range(reps):
            for name, parallelism in (("same", was), ("rescale", now)):
                shutil.copytree(storage, base)
                site.land(np.array([0]), rep)
                site.forget()
                times[name].append(site.epochs("fresh", parallelism))
                shutil.rmtree(storage)
                base.rename(storage)
                max((site.root / "landing").iterdir()).unlink()
            site.forget()
            times["restore"].append(seconds(site.restore))
        site.land(np.array([0]), 99)
        site.epochs("fresh", now)
        medians = harness.medians_of(times)
        values = "equal" if digest(site) == before else "WRONG"
        ratio = medians["rescale"] / medians["same"]
        rows.append({"change": f"{was} -> {now}", **medians, "ratio": ratio, "values": values})
    return rows


def by_increments(root: Path, epochs: int) -> list[Row]:
    """Restore time by how many earlier checkpoints the newest one's files come from."""
    site = Site(root / "site", 200_000, 256)
    site.fill()
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for number in range(epochs + 1):
        if number in (0, epochs // 4, epochs // 2, epochs):
            times: dict[str, list[float]] = {"seconds": []}
            for _ in range(3):
                site.forget()
                times["seconds"].append(seconds(site.restore))
            head = site.head()
            rows.append(
                {
                    "epochs": number,
                    "checkpoints named": len({file.path.split("/")[2] for file in site.state_files()}),
                    "files": head.files,
                    "bytes": head.bytes_total,
                    **harness.medians_of(times),
                }
            )
        site.land(np.unique(rng.integers(0, site.keys, 2_000)), number)
        site.epochs()
    return rows


def main(
    sizes: Annotated[str, typer.Option(help="GB")] = "1,5",
    keys: Annotated[int, typer.Option(help="of the rescaled state")] = 10_000_000,
    increments: Annotated[int, typer.Option(help="epochs")] = 60,
    reps: int = 3,
    results: Path = harness.RESULTS / "restore",
) -> None:
    """Restore, rescale and the first epoch after a kill, beside plainly copying the same bytes."""
    figures: Row = {"machine": harness.machine(), "reps": reps, "sizes": {}}
    for size in filter(None, sizes.split(",")):
        figures["sizes"][size] = harness.in_scratch(of_size, float(size), reps)
        harness.publish(results, figures, harness.render("restore", **figures))
    if keys:
        figures |= {"rescale": harness.in_scratch(rescaled, keys, reps), "keys": keys}
        harness.publish(results, figures, harness.render("restore", **figures))
    if increments:
        figures["increments"] = harness.in_scratch(by_increments, increments)
    harness.publish(results, figures, harness.render("restore", **figures))


if __name__ == "__main__":
    typer.run(main)
