"""What `<!-- test: WORDS -->` of a page does to its project: real signals, real damage. What an action shows is
compared like output."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.playbooks.project import Project
from weir.local import dagster_home

_ACTIONS: list[tuple[re.Pattern[str], Callable[..., str | None]]] = []


def act(project: Project, words: str) -> None:
    """Do what the words say. KeyError for words that nothing here understands."""
    for pattern, action in _ACTIONS:
        match = pattern.fullmatch(words)
        if match:
            shown = action(project, *match.groups())
            if shown is not None:
                project.shown = shown
            return
    raise KeyError(f"no action is called: {words}")


def action(pattern: str) -> Callable:
    """Words, with groups for its arguments."""

    def named(function: Callable[..., str | None]) -> Callable[..., str | None]:
        _ACTIONS.append((re.compile(pattern), function))
        return function

    return named


# -- the pipeline goes on


@action(r"(\d+) days? lands?")
def _(project: Project, count: str) -> None:
    project.land(int(count))


@action(r"weir (.*)")
def _(project: Project, arguments: str) -> str:
    """To set the scene; what the page is about stands in it as a command."""
    return project.weir(arguments)


@action(r"a coordinator runs")
def _(project: Project) -> None:
    project.start()
    project.until_read()


@action(r"the coordinator's log")
def _(project: Project) -> str:
    return project.output()


@action(r"the coordinator ends with (\d+)")
def _(project: Project, code: str) -> str:
    assert project.ended() == int(code), project.output()
    return project.output()


@action(r"one tick of the (\w+)")
def _(project: Project, sensor: str) -> str:
    return project.tick(sensor)


@action(r"two ticks of the (\w+), (\d+) s apart")
def _(project: Project, sensor: str, seconds: str) -> str:
    project.tick(sensor)
    time.sleep(float(seconds))
    return project.tick(sensor)


# -- and something happens to it


@action(r"kill the coordinator")
def _(project: Project) -> None:
    project.signal(signal.SIGKILL)


@action(r"freeze the coordinator")
def _(project: Project) -> None:
    project.signal(signal.SIGSTOP)


@action(r"its machine is gone")
def _(project: Project) -> None:
    """What it had on its own disk is not on the next one's."""
    shutil.rmtree(project.folder / ".weir" / "work")


@action(r"the storage root is a bucket")
def _(project: Project) -> None:
    project.into_a_bucket()


@action(r"the store (refuses|answers)")
def _(project: Project, how: str) -> None:
    assert project.bucket is not None
    if how == "refuses":
        project.bucket.door.shut()
    else:
        project.bucket.door.open()


@action(r"an object of the newest checkpoint is (lost|altered)")
def _(project: Project, how: str) -> None:
    """A real file of its state: gone, or one byte of it another; a backup has it as it was."""
    tables = sorted((project.site.storage / "state" / "aircraft_rotation").glob("g*-e*/*/*.sst"))
    victim = max(tables, key=lambda path: int(path.parts[-3].split("-e")[1]))
    backup = project.folder / "backup" / victim.relative_to(project.folder / ".weir" / "storage")
    backup.parent.mkdir(parents=True)
    shutil.copy2(victim, backup)
    if how == "lost":
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)


@action(r"keep all that is there")
def _(project: Project) -> None:
    """For several ways out of the same state."""
    shutil.copytree(project.folder / ".weir", project.root / "kept", symlinks=True)
    project.kept = project.landed


@action(r"all is as it was kept")
def _(project: Project) -> None:
    project.assert_exact()  # of the way that ends here
    shutil.rmtree(project.folder / ".weir")
    shutil.copytree(project.root / "kept", project.folder / ".weir", symlinks=True)
    project.landed = project.kept


@action(r"nothing has run yet")
def _(project: Project) -> None:
    """Of another way into the same trouble: days have landed, and no checkpoint has been made."""
    project.assert_exact()  # of the way that ends here
    for path in (project.folder / ".weir").iterdir():
        if path.name not in ("landing", "cache"):
            shutil.rmtree(path)


@action(r"the project is in git")
def _(project: Project) -> None:
    """So that a deploy can be taken back, as people do."""
    who = "git -c user.name=ops -c user.email=ops@example.org"
    code, output = project.bash(f"git init -q . && echo .weir > .gitignore && git add -A . && {who} commit -qm good")
    assert code == 0, output
    project.env |= {f"GIT_{role}_{what}": "ops" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@action(r"bad code is deployed")
def _(project: Project) -> None:
    """Every leg is late twice."""
    project.edit(
        "pipelines/flights.py",
        "    before = state.lag(",
        '    legs = legs.with_columns(pl.col("dep_delay", "arr_delay") * 2)  # minutes, surely\n    before ='
        " state.lag(",
    )
    code, output = project.bash("git commit -qam 'minutes'")
    assert code == 0, output


# -- Dagster


@action(r"Dagster's database is damaged")
def _(project: Project) -> None:
    """Its home as weir/local/dagster.yaml has it, with runs that it knows; then its files are rubbish."""
    home = project.folder / ".weir" / "dagster"
    home.mkdir()
    shutil.copy(project.folder / "weir" / "local" / "dagster.yaml", home)
    code, output = project.bash('DAGSTER_HOME="$PWD/.weir/dagster" dagster run list')
    assert code == 0, output
    databases = list(home.rglob("*.db"))
    assert databases
    for database in databases:
        database.write_bytes(b"rubbish" * 1000)


@action(r"Dagster runs until all files are read")
def _(project: Project) -> str:
    """A real daemon with its code server, as `dagster dev` has it, on the home that the page has made."""
    project.configure({"dagster": {"sensor_seconds": 5}})
    log = project.root / "daemon.log"
    injected = Path(__file__).with_name("injected")
    env = project.env | {
        "DAGSTER_HOME": str(project.folder / ".weir" / "dagster"),
        "PYTHONPATH": os.pathsep.join([str(injected), str(project.folder)]),
    }
    with log.open("wb") as sink:
        daemon = subprocess.Popen(
            ["dagster-daemon", "run", "-w", "workspace.yaml"],
            cwd=project.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            executable=shutil.which("dagster-daemon", path=env["PATH"]),
        )
    try:
        project.until(lambda: project.files_read() >= project.landed, "Dagster reads all files", log)
        project.until(lambda: "RUN_SUCCESS" in log.read_text(), "its run ends", log)
    finally:
        dagster_home.end(daemon)
    return log.read_text()


# -- another bucket


@action(r"there is another bucket, (.*)")
def _(project: Project, name: str) -> None:
    assert project.bucket is not None
    project.bucket.client.create_bucket(Bucket=name)


@action(r"the provider copies everything below the root to (.*)")
def _(project: Project, name: str) -> None:
    """By S3's own copy, on its side."""
    bucket = project.bucket
    assert bucket is not None
    pages = bucket.client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix="weir/")
    for stored in (stored for page in pages for stored in page["Contents"]):
        source = {"Bucket": bucket.name, "Key": stored["Key"]}
        bucket.client.copy_object(Bucket=name, Key=stored["Key"], CopySource=source)
    project.bucket = replace(bucket, name=name)


# -- somebody else at the tables


@action(r"somebody drops the table (\w+)")
def _(project: Project, table: str) -> None:
    """There is a backup of this moment."""
    shutil.copytree(project.site.storage / "tables" / table, project.folder / "backup" / "flights" / "tables" / table)
    shutil.rmtree(project.site.storage / "tables" / table)


@action(r"the file of the table (\w+) that checkpoint (\d+) made is lost")
def _(project: Project, table: str, checkpoint: str) -> None:
    """Nobody has a copy. fsck names it, and readers of the table fail."""
    victim = min((project.site.storage / "tables" / table / "data").glob(f"g*-e{checkpoint}/*.parquet"))
    victim.unlink()
    code, output = project.bash("weir fsck flights")
    assert code == 1 and "missing rows (damage): 1" in output and f"-e{checkpoint}/" in output, output


@action(r"somebody deletes rows of the table (\w+)")
def _(project: Project, table: str) -> None:
    deleted = DeltaTable(str(project.site.storage / "tables" / table)).delete("dep_delay > 60")
    assert deleted["num_deleted_rows"] > 0


@action(r"a run is cut off between commit and publish")
def _(project: Project) -> None:
    cut = "def cut(*_): raise OSError('cut off')"
    code, output = project.bash(
        f"""python3 -c "
import weir.ownership.publish as publish
{cut}
publish._publish = cut
from weir.cli.main import app
app(['run', 'flights', '--until-caught-up'])"
"""
    )
    assert code != 0 and "cut off" in output, output


@action(r"somebody adds a constraint to the table (\w+)")
def _(project: Project, table: str) -> None:
    DeltaTable(str(project.site.storage / "tables" / table)).alter.add_constraint({"short": "dep_delay < 100000"})


@action(r"somebody drops the constraint of the table (\w+)")
def _(project: Project, table: str) -> None:
    DeltaTable(str(project.site.storage / "tables" / table)).alter.drop_constraint("short")


# -- a disk


@action(r"all is on one small disk")
def _(project: Project) -> None:
    disk = project.folder / ".weir"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a disk that can be full needs mount: {mounted.stderr.strip()}")
    project.ending.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
    (project.root / "landing").mkdir()  # input lies elsewhere
    disk.joinpath("landing").symlink_to(project.root / "landing")


@action(r"the disk fills up")
def _(project: Project) -> None:
    """To the last byte, by somebody else."""
    with (project.folder / ".weir" / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@action(r"somebody makes room on the disk")
def _(project: Project) -> None:
    (project.folder / ".weir" / "filler").unlink()


# -- a schema


@action(r"a day lands whose dep_delay is text")
def _(project: Project) -> None:
    day = project.days[project.landed]
    rows = pq.read_table(day)
    at = rows.schema.get_field_index("dep_delay")
    pq.write_table(
        rows.set_column(at, "dep_delay", rows["dep_delay"].cast(pa.string())), project.site.landing / day.name
    )
    project.landed += 1


@action(r"the source repairs the newest file")
def _(project: Project) -> None:
    day = project.days[project.landed - 1]
    project.deliver(pq.read_table(day), day.name)


@action(r"rows are late")
def _(project: Project) -> None:
    """What the page says of its price is so: those of the day that came back, and its windows lack them."""
    (day,) = set(project.site.table("airport_hourly_late")["scheduled"].dt.strftime("%Y-%m-%d").tolist()) - {
        "2013-01-06"
    }
    assert day == "2013-01-05"


@action(r"the tables are as if nothing had been late")
def _(project: Project) -> None:
    assert project.site.table("airport_hourly_late").empty
    project.site.assert_exact_so_far(project.landed)


@action(r"a deploy adds a column to a table")
def _(project: Project) -> None:
    project.edit(
        "pipelines/flights.py",
        "        inherited=inherited,\n    )",
        '        inherited=inherited, weekday=legs["scheduled"].dt.weekday(),\n    )',
    )
    code, output = project.bash("git commit -qam weekday")
    assert code == 0, output


@action(r"the stage forgets keys after (\w+)")
def _(project: Project, duration: str) -> None:
    project.edit("pipelines/flights.py", "    state=Aircraft,\n", f'    state=Aircraft,\n    ttl="{duration}",\n')


# -- input that was wrong, and a version beside another


@action(r"days of flights may be backfilled")
def _(project: Project) -> None:
    project.configure({"pipelines": {"flights": {"backfill": {"start": "2013-01-01", "keep": 6}}}})


@action(r"the source delivers (\d+) days wrongly")
def _(project: Project, count: str) -> None:
    """Every delay is an hour too long."""
    for day in project.days[project.landed : project.landed + int(count)]:
        table = pq.read_table(day)
        for name in ("dep_delay", "arr_delay"):
            at = table.schema.get_field_index(name)
            longer = pa.array(
                [None if value is None else value + 60 for value in table[name].to_pylist()], table[name].type
            )
            table = table.set_column(at, table.schema.field(name), longer)
        project.deliver(table, day.name)
        project.wrong.append(day)
    project.landed += int(count)


@action(r"the source delivers those days again")
def _(project: Project) -> None:
    for day in project.wrong:
        project.deliver(pq.read_table(day), day.name)


@action(r"the new version is checked out")
def _(project: Project) -> None:
    """A field more, and another parallelism; the old one stays committed."""
    legs = '    legs: Annotated[int, "Flown so far."] = 0\n'
    project.edit("pipelines/flights.py", legs, f"{legs}    diverted: int = 0\n")
    project.edit(
        "pipelines/flights.py",
        "    state.fold(legs, legs=agg.count(), ",
        '    legs = legs.with_columns(lost=pl.col("arr_delay").is_null().cast(pl.Int64))\n'
        '    state.fold(legs, legs=agg.count(), diverted=agg.sum("lost"), ',
    )
    project.configure({"spark": {"parallelism": 3}})
    project.retired = ("aircraft_rotation.diverted",)


@action(r"the old version reads them")
def _(project: Project) -> None:
    code, output = project.bash("git stash -q && weir run flights --until-caught-up && git stash pop -q", timeout=240)
    assert code == 0, output
