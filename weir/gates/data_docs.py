"""Great Expectations' Data Docs of a pipeline: all its gates and restore expectations, asked of what is there now, as
pages to look at.

    table <name>      the newest rows of a stage's table, at most 10,000: its gates on rows, and what on_restore says of
                      the table
    state <uid>       at most 10,000 rows of its state in the newest checkpoint: its gates on state, and what on_restore
                      says of it
    figures <uid>     a row for each retained checkpoint with rows for the stage: its gates on figures

Reads only, and starts no Spark. A value of a row is a text on the pages and nothing else (`data_docs_pages`). The pages
are made by Great Expectations' own site builder, beside the place where they go, and put there at once: who reads them
finds the old ones or the new ones. What they load from elsewhere (scripts, styles, fonts, logos) is put beside them, so
that they need no network: `data_docs_assets.zip` has it, with versions and licences.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from state_ops.errors import ConfigurationError, PipelineError, TransientError
from state_ops.facts import Facts, fact
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import make_private
from weir.definition import FIGURES, ROWS, STATE, Gate, Pipeline
from weir.gates import epoch_gates, evaluation, restore_gates
from weir.gates.evaluation import GateVerdict
from weir.inspection import state_reader
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings

_MARK = ".weir-data-docs"  # a directory without it is somebody else's
_ASSETS = Path(__file__).with_name("data_docs_assets.zip")
_VENDOR = "static/vendor"
_LOGO = "static/images/logo-long.png"
_REFERENCE = re.compile(
    r"""(?P<before>\b(?:src|href)\s*=\s*["']|\burl\(["']?)(?P<url>(?:https?:)?//[^"'()\s<>]+)""", re.IGNORECASE
)
_STATIC = re.compile(r"""(\b(?:src|href)\s*=\s*["'])(?:\./|(?:\.\./)+)static/""")  # of which some are a directory off
_SEALED = re.compile(
    r"""\s(?:integrity|crossorigin)=(?:"[^"]*"|'[^']*')"""
)  # what a file's page may not load, or of another file


@dataclass(frozen=True, slots=True)
class DataDocs(Facts):
    """The pages that were made.

    Attributes:
        index: The page to begin with.
        verdicts: Of every expectation that was asked; of a restore expectation `gate` is what it expects, `stage` the
            stage or table.
        left_out: What could not be looked at, and why, in words.
    """

    pipeline: str
    index: Path
    verdicts: tuple[GateVerdict, ...]
    left_out: tuple[str, ...]

    @property
    @fact
    def passed(self) -> bool:
        """True if every expectation passed."""
        return all(verdict.passed for verdict in self.verdicts)


def build(pipeline: Pipeline, settings: Settings, directory: Path | str | None = None) -> DataDocs:
    """Make the pages; whoever runs the pipeline goes on.

    Args:
        directory: By default `<local.work_dir>/data_docs/<pipeline>`.

    Raises:
        ConfigurationError: For a directory that has something else in it.
        TransientError: Where it cannot be written.
    """
    target = settings.work_dir / "data_docs" / pipeline.title if directory is None else Path(directory)
    target = target.expanduser().resolve()
    _refuse_others(target)
    building = target.with_name(f".{target.name}-{os.getpid()}")
    left_out: list[str] = []
    try:
        shutil.rmtree(building, ignore_errors=True)
        make_private(building.parent)
        building.mkdir(mode=0o700)
        (building / _MARK).touch()
        nonce = secrets.token_urlsafe(16)
        verdicts = list(_asked(_subjects(pipeline, settings, left_out), building, left_out, nonce))
        _with_assets(building, nonce)
        _put(building, target)
    except OSError as error:
        raise TransientError(
            f"The report could not be written: {error}", where=str(target), next="Name another directory, or make room."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return DataDocs(pipeline.title, target / "index.html", tuple(verdicts), tuple(left_out))


def _refuse_others(target: Path) -> None:
    if target.exists() and not (target.is_dir() and ((target / _MARK).exists() or not any(target.iterdir()))):
        raise ConfigurationError(
            "There is something else where the report is to go.",
            where=str(target),
            next="Name a directory that is empty, or that has an earlier report.",
        )


def _put(building: Path, target: Path) -> None:
    before = target.with_name(f"{building.name}-before")
    shutil.rmtree(before, ignore_errors=True)
    if target.exists():
        target.rename(before)
    building.rename(target)
    shutil.rmtree(before, ignore_errors=True)


# -- what is looked at


@dataclass(frozen=True, slots=True)
class _Subject:
    """of: rows, state or figures; name: a table or a stage."""

    title: str
    of: str
    name: str
    gates: tuple[Gate, ...]
    rows: pa.Table


def _subjects(pipeline: Pipeline, settings: Settings, left_out: list[str]) -> Iterator[_Subject]:
    """Yield the subjects one after the other, so that no two of them are in memory."""
    storage, registry = open_storage(pipeline, settings)
    retained = registry.checkpoints()
    head = retained[-1] if retained else None
    for title, (of, name, asked) in _asked_of(pipeline, left_out).items():
        rows = _rows(pipeline, settings, storage, retained, head, of, name)
        if rows is None:
            left_out.append(f"{title}: there is nothing yet")
        else:
            yield _Subject(title, of, name, tuple(asked), rows)


def _asked_of(pipeline: Pipeline, left_out: list[str]) -> dict[str, tuple[str, str, list[Gate]]]:
    subjects: dict[str, tuple[str, str, list[Gate]]] = {}
    for stage in pipeline.stages:
        for gate in stage.gates:
            if gate.of != ROWS:
                subjects.setdefault(f"{gate.of} {stage.uid}", (gate.of, stage.uid, []))[2].append(gate)
            elif stage.sink in pipeline.tables:
                subjects.setdefault(f"table {stage.sink.name}", (ROWS, stage.sink.name, []))[2].append(gate)
            else:
                left_out.append(f"{stage.uid}: {gate.title}: its rows are kept in no table")
    of_keys = restore_gates.not_asked(pipeline)
    for expected in pipeline.on_restore:
        if expected.of == "table" and expected.name in of_keys:
            left_out.append(f"table {expected.name}: {expected.gate.title}: a branch has what became of its keys alone")
            continue
        of = STATE if expected.of == "state" else ROWS
        subjects.setdefault(f"{expected.of} {expected.name}", (of, expected.name, []))[2].append(expected.gate)
    return subjects


def _rows(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    retained: Sequence[Checkpoint],
    head: Checkpoint | None,
    of: str,
    name: str,
) -> pa.Table | None:
    if of == ROWS:
        return restore_gates.sample(restore_gates.newest_rows(storage, name))
    if of == FIGURES:
        rows = [stats for row in retained if epoch_gates.has_rows(stats := stats_of(row, name))]
        return pa.concat_tables(map(epoch_gates.figures_row, rows), promote_options="default") if rows else None
    if head is None or name not in head.stages_with_state:
        return None
    return restore_gates.sample(state_reader.scan(pipeline, settings, name))


# -- Great Expectations


def _asked(subjects: Iterator[_Subject], directory: Path, left_out: list[str], nonce: str) -> Iterator[GateVerdict]:
    with evaluation.apart() as (gx, context):
        from weir.gates import data_docs_pages  # of Great Expectations' classes

        for name in list(context.get_site_names()):
            context.delete_data_docs_site(name)
        context.add_data_docs_site("weir", data_docs_pages.site(str(directory), nonce))
        source = context.data_sources.add_pandas("weir")
        for subject in subjects:
            by_form: dict[evaluation.Form, list[evaluation.Asked]] = {}
            for number, gate in enumerate(subject.gates):
                try:
                    expected = evaluation.expectation(subject.title, gate)
                    by_form.setdefault(evaluation.form_of(expected), []).append((number, gate, expected))
                except PipelineError as error:
                    left_out.append(f"{subject.title}: {gate.title}: {error.what}")
            for form, asked in by_form.items():
                # A page has one frame. Most subjects need no more than one.
                title = subject.title if len(by_form) == 1 else f"{subject.title} ({form})"
                suite = gx.ExpectationSuite(name=title)
                entries = evaluation.enter(suite, asked)
                batch = source.add_dataframe_asset(title).add_batch_definition_whole_dataframe("newest")
                definition = gx.ValidationDefinition(name=title, data=batch, suite=context.suites.add(suite))
                frame = evaluation.pandas(subject.rows, form)
                outcomes = context.validation_definitions.add(definition).run(batch_parameters={"dataframe": frame})
                for number, outcome in evaluation.by_number(entries, outcomes.results):
                    gate = subject.gates[number]
                    try:
                        yield evaluation.verdict_of(
                            subject.title, subject.name, gate, outcome, len(frame), of=subject.of
                        )
                    except PipelineError as error:
                        left_out.append(f"{subject.title}: {gate.title}: {error.what}")
        context.build_data_docs(site_names=["weir"])


# -- without a network


def _with_assets(site: Path, nonce: str) -> None:
    """Put beside the pages what they load from other hosts, and let them load it from there; links to other hosts lead
    nowhere."""
    from weir.gates import data_docs_pages

    with zipfile.ZipFile(_ASSETS) as archive:
        archive.extractall(site / _VENDOR)
        there = {_plain(name): f"{_VENDOR}/{name}" for name in archive.namelist()}
    for page in [*site.rglob("*.html"), *site.rglob("static/styles/*.css")]:
        up = "../" * (len(page.relative_to(site).parts) - 1)

        def local(link: re.Match[str], up: str = up) -> str:
            before, url = link["before"], link["url"].partition("?")[0].partition("#")[0]
            path = _LOGO if url.endswith(".png") else there.get(_plain(url))
            if path is not None:
                return f"{before}{up}{path}"
            return before + ("#" if before.lower().startswith("href") else "data:,")

        text = _STATIC.sub(rf"\g<1>{up}static/", _SEALED.sub("", page.read_text()))
        text = _REFERENCE.sub(local, text)
        page.write_text(data_docs_pages.sealed(text, nonce) if page.suffix == ".html" else text)


def _plain(url: str) -> str:
    """Return the file that a URL or path names, without its version and whether it is minified: vega@5 and vega.min.js
    are vega.js."""
    name = url.rpartition("/")[2]
    name = re.sub(r"@\d[\d.]*$", ".js", name)
    return re.sub(r"-\d[\d.]*(?=\.)", "", name).replace(".min.", ".")
