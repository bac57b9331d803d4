"""Forks: a branch of a pipeline from one of its checkpoints, with storage and tables of its own, without copying state.

    coordinator of the pipeline   pins the checkpoint under the branch's name, so that retention keeps its objects
    branches/<uuid>/              the branch's own registry begins with a checkpoint that names those objects

A branch runs like a pipeline, under the name PIPELINE@BRANCH, with the code of the checkout. It reads what the pipeline
has read since that checkpoint, and no more. Once it has caught up, both have read the same input and can be compared.
It never writes or deletes anything outside its own directory.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Final

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.errors import ConfigurationError, DamageError, PrunedError, WeirError
from state_ops.facts import FLAT, HIDDEN, Facts, Named, fact
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import FORK, FORKED, RANGE_END, RANGE_START, Checkpoint
from state_ops.records.pins import BRANCH, Pin
from state_ops.records.snapshot_files import STATE
from state_ops.storage.branches import BRANCHES, Branch, inherited, is_inherited, pinned
from state_ops.storage.storage import Storage
from weir.connectors.delta.replace_where import Range
from weir.definition import Pipeline
from weir.inspection.state_reader import At, whole
from weir.ownership import savepoints
from weir.ownership.derived_checkpoint import first_of, lasting
from weir.ownership.local_paths import local_directory
from weir.ownership.ownership import claimed
from weir.ownership.pipeline_storage import open_storage, readers, storage_errors
from weir.run import maintenance
from weir.settings.configuration import Settings
from weir.sources.positions import Arrivals

log = Logger("weir.fork")

# In a branch's storage: how far its backfill is, and what it replaces; written after its first checkpoint.
NOTE = "backfill.json"
RANGE: Final = "range"  # what a backfill replaces that leaves state and all other rows alone
# In a branch's storage: the same as its checkpoints' totals say, for earlier releases and of branches of theirs.
_ONLY = "promotes.json"


@dataclass(frozen=True, slots=True)
class Fork(Facts):
    """A branch.

    Attributes:
        base: The checkpoint from which it was forked, as the pipeline numbers it.
        commit_id: The commit id of that checkpoint's row.
        head: The branch's newest checkpoint. None: its creation was cut off, and asking for it again finishes it.
        behind: By source, what the pipeline has read and the branch has not.
        bytes_own: Of the state of that checkpoint, what the branch does not share with its pipeline. None: there is no
            such checkpoint, or its listing cannot be read.
    """

    branch: Annotated[Branch, FLAT]
    base: CheckpointId
    commit_id: Annotated[str, HIDDEN]
    created_at: datetime
    reason: str
    head: Checkpoint | None
    behind: Annotated[Mapping[str, Arrivals], Named("files_behind")]
    bytes_own: int | None

    @property
    @fact
    def bytes_total(self) -> int | None:
        """The bytes of that checkpoint's state."""
        return None if self.head is None else self.head.bytes_total


def branched(pipeline: Pipeline, settings: Settings, name: str) -> Pipeline:
    """Return the pipeline as its branch of that name.

    Raises:
        WeirError: There is no such branch.
    """
    _, registry = open_storage(_trunk(pipeline), settings)
    pin = registry.pinned(BRANCH, name)
    if pin is None:
        raise _unknown(pipeline, registry, name)
    return replace(pipeline, branch=_branch(pin))


def forks(pipeline: Pipeline, settings: Settings) -> list[Fork]:
    """Return the branches of a pipeline, oldest first. Only reads."""
    _, registry = open_storage(pipeline, settings)
    return [_described(pipeline, settings, pin) for pin in registry.pins() if pin.kind == BRANCH]


def fork(
    pipeline: Pipeline, settings: Settings, name: str, at: At = None, reason: str = "", *, only: Range | None = None
) -> Fork:
    """Fork a pipeline from one of its checkpoints, while its coordinator may be running.

    If an earlier call for the same name was cut off, this one finishes it.

    Args:
        at: The checkpoint's number or a savepoint's name; by default the newest checkpoint.
        only: A promotion of the branch replaces the rows of this range alone.

    Raises:
        WeirError: There is no such checkpoint, or the name is taken.
    """
    _check_trunk(pipeline)
    _check_replayable(pipeline)
    savepoints.check_name(name, "branch")
    storage, registry = open_storage(pipeline, settings)
    with storage_errors(pipeline, settings, storage):
        return _forked(pipeline, settings, registry, name, at, reason, only)


def _forked(
    pipeline: Pipeline, settings: Settings, registry: Registry, name: str, at: At, reason: str, only: Range | None
) -> Fork:
    newest = (
        registry.head()
    )  # read before the base is chosen and pinned: the branch may not know what is promoted from here on
    pin, base = registry.pinned(BRANCH, name), whole(pipeline, registry, at)
    if pin is not None:  # a fork that was cut off at an unknown time
        newest = None
    else:
        named = f"{uuid.uuid4().hex} {reason}".strip()
        asked = Request(requests.FORK, savepoint=name, checkpoint=int(base.id), reason=named)
        maintenance.asked(
            pipeline,
            settings,
            asked,
            lambda context: savepoints.pin_branch(context, asked),
            settings.checkpoints.timeout_seconds,
        )
        pin = registry.pinned(BRANCH, name)
        if pin is None:
            raise PrunedError(
                f"Checkpoint {base.id} was pruned before it could be forked, or the coordinator of {pipeline.title} "
                "failed over it.",
                next="Look again: `weir checkpoints` lists what is retained. A savepoint stays: weir savepoint.",
            )
    fork = _described(pipeline, settings, pin)
    if fork.head is not None or (at is not None and pin.commit_id != base.commit_id):
        raise WeirError(
            f"{pipeline.title} has a branch {name!r} already, forked from checkpoint {pin.checkpoint_id}.",
            next=f"Choose another name, or drop it: weir fork {pipeline.title} --drop {name}",
        )
    _plant(pipeline, settings, pin, newest, only)
    log.info("forked", pipeline=pipeline.title, branch=name, checkpoint=int(pin.checkpoint_id))
    return _described(pipeline, settings, pin)


def _plant(pipeline: Pipeline, settings: Settings, pin: Pin, newest: Checkpoint | None, only: Range | None) -> None:
    """Begin the branch's own registry with the checkpoint from which it is forked.

    Args:
        newest: The pipeline's newest checkpoint before the base was pinned. None: nobody knows, so everything since the
            base counts as made since the fork.
    """
    _, registry = open_storage(pipeline, settings)
    base = next((row for row in registry.checkpoints() if row.commit_id == pin.commit_id), None)
    if base is None:
        raise DamageError(
            f"Checkpoint {pin.checkpoint_id}, of which {pipeline.title} has the branch {pin.name!r}, is gone.",
            next=f"`weir fsck {pipeline.title}` says what else is. The branch is of no use: weir fork "
            f"{pipeline.title} --drop {pin.name}",
        )
    listing = lasting(registry.files(base), base.operators)
    renamed = [(file, replace(file, path=inherited(file.path), new=False)) for file in listing]
    here = replace(pipeline, branch=_branch(pin))
    with claimed(here, settings) as owner:
        if owner.head is None:
            owner.heartbeat.begin(base.id)
            if only is not None:
                owner.context.storage.put_bytes(_ONLY, json.dumps({"start": only.start, "end": only.end}).encode())
            reason = f"checkpoint {base.id} of {pipeline.title}"
            beginning = {
                FORKED: max(int(row.id) for row in (base, newest) if row is not None),
                RANGE_START: only.start if only is not None else 0,
                RANGE_END: only.end if only is not None else 0,
            }
            first_of(owner.context, base, renamed, base.id, kind=FORK, what=reason, beginning=beginning)


def drop(pipeline: Pipeline, settings: Settings, name: str) -> Fork:
    """Remove a branch with all its data, and prune what the pipeline kept only for it.

    Raises:
        BusyError: Somebody runs the branch.
        WeirError: There is no branch of this name.
    """
    _check_trunk(pipeline)
    storage, registry = open_storage(pipeline, settings)
    with storage_errors(pipeline, settings, storage):
        return _dropped(pipeline, settings, storage, registry, name)


def _dropped(pipeline: Pipeline, settings: Settings, storage: Storage, registry: Registry, name: str) -> Fork:
    pin = registry.pinned(BRANCH, name)
    if pin is None:
        raise _unknown(pipeline, registry, name)
    fork, here = _described(pipeline, settings, pin), replace(pipeline, branch=_branch(pin))
    branch_storage, _ = open_storage(here, settings)
    if fork.head is not None:
        with claimed(here, settings):  # raises BusyError if a coordinator is seen to run
            pass  # fences a coordinator that is not seen: it can commit nothing any more
    storage.delete_tree(f"{BRANCHES}/{fork.branch.id}")
    shutil.rmtree(local_directory(settings, here, branch_storage), ignore_errors=True)
    maintenance.asked(
        pipeline,
        settings,
        Request(requests.UNFORK, savepoint=name),
        lambda context: savepoints.unname(context, BRANCH, name),
        settings.checkpoints.timeout_seconds,
    )
    if registry.pinned(BRANCH, name) is not None:
        raise WeirError(
            f"The coordinator of {pipeline.title} did not let the branch {name!r} go.",
            next="It failed over that: its log, and `weir status`, say why. Then ask again.",
        )
    return fork


def range_of(branch: Storage, head: Checkpoint) -> Range | None:
    """Return the rows that a branch is to replace; None: state, and all rows since the fork.

    Args:
        branch: The branch's own storage.
        head: The branch's newest checkpoint, whose totals decide. The file beside the registry may be left from a fork
            that was cut off and then asked for again with another range. Therefore, on a branch of an earlier release,
            the file counts only if its backfill has confirmed it.
    """
    if RANGE_START in head.totals:
        span = Range(head.totals[RANGE_START], head.totals[RANGE_END])
        return span if span.start < span.end else None
    raw, note = branch.read_bytes(_ONLY), branch.read_bytes(NOTE)
    confirmed = note is not None and json.loads(note).get("replaces") == RANGE
    return Range(**json.loads(raw)) if raw and confirmed else None


def behind(pipeline: Pipeline, settings: Settings, head: Checkpoint | None) -> dict[str, Arrivals]:
    """Return by source what a branch has still to read until it has read what its pipeline has."""
    offsets = head.offsets if head else {}
    return {name: reader.look(offsets.get(name)) for name, reader in readers(pipeline, settings).items()}


def _trunk(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, branch=None)


def _check_trunk(pipeline: Pipeline) -> None:
    if pipeline.branch is not None:
        raise ConfigurationError(
            f"{pipeline.title} is a branch, and branches have none of their own.",
            next=f"Name the pipeline: {pipeline.name}.",
        )


def _check_replayable(pipeline: Pipeline) -> None:
    gone = [source for source in pipeline.sources if not (source.replayable or source.archive)]
    if gone:
        raise ConfigurationError(
            f"{pipeline.title} cannot be forked: a branch reads again, and {gone[0].name} ({gone[0].kind}) can be read "
            "once.",
            next="archive=True of the source keeps what was read, for branches and rewinds.",
        )


def _branch(pin: Pin) -> Branch:
    return pinned(pin.name, pin.reason)


def _described(pipeline: Pipeline, settings: Settings, pin: Pin) -> Fork:
    here = replace(pipeline, branch=_branch(pin))
    _, registry = open_storage(here, settings)
    head = registry.head()
    return Fork(
        branch=_branch(pin),
        base=pin.checkpoint_id,
        commit_id=pin.commit_id,
        created_at=pin.created_at,
        reason=pin.reason.partition(" ")[2],
        head=head,
        behind=behind(here, settings, head) if head is not None else {},
        bytes_own=_bytes_own(registry, head) if head is not None else None,
    )


def _bytes_own(registry: Registry, head: Checkpoint) -> int | None:
    try:
        listing = registry.files(head)
    except (DamageError, PrunedError):  # a branch is listed and dropped all the same
        return None
    return sum(file.bytes for file in listing if file.kind == STATE and not is_inherited(file.path))


def _unknown(pipeline: Pipeline, registry: Registry, name: str) -> WeirError:
    names = ", ".join(pin.name for pin in registry.pins() if pin.kind == BRANCH) or "none"
    return WeirError(
        f"{pipeline.name} has no branch {name!r}.",
        next=f"Its branches: {names}. A new one: weir fork {pipeline.name} --name {name}",
    )
