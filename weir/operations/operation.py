"""An operation on a pipeline, declared once: its options, its plan, what it does, and its words for people.

    @operation(SeekPlan, plans=True, asks=True)
    def seek(here: Here, source: Annotated[str, Argument("The source's name.")]) -> Steps:
        \"\"\"Read a source on from another position.\"\"\"
        plan = seeking.plan(here.pipeline, here.settings, source, "latest")
        yield Plan(plan, [f"{source} goes on from its end."], ask="seek")
        done = maintenance.seek(here.pipeline, here.settings, source, "latest")
        yield Done(replace(plan, checkpoint=done.id), [f"{here.name} is at checkpoint {done.id}."])

The command with its `--json` and schema (`weir.cli.operations`) and Dagster's job (`weir.dagster.operations`) are made
from that. Both go on behind the plan only if it has no obstacle that nobody has accepted. `weir.operations.declared`
has Weir's operations. Another package adds its own by the entry point `weir.operations`, whose name is the command's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from weir.definition import Pipeline
from weir.run.run import RunOptions
from weir.settings.configuration import Settings

COMMAND, JOB = "command", "job"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an operation, beside its type.

    Attributes:
        about: Its help, and its description in the Launchpad.
        flags: As the command takes it; by default two dashes and the parameter's name.
        metavar: How the command's help shows its value.
        complete: The name of what the shell completes it with, in `weir.cli.shell.completion`.
        only: COMMAND or JOB, if the other one has no such option.
        in_job: The description in the Launchpad, if that says something else.
        required: The job requires it.
        hidden: The command's help does not show it.
    """

    about: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    complete: str | None = None
    only: str | None = None
    in_job: str | None = None
    required: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Argument(Option):
    """An option that a command takes by its place, without a flag."""


Reason = Annotated[
    str, Option("A note that `weir checkpoints` shows.", in_job="A note that the list of checkpoints shows.")
]
"""Where it has no default, the job's is its own name."""
AtCheckpoint = Annotated[
    int | None,
    Option("At this checkpoint; by default the newest.", ("--checkpoint", "--at"), metavar="N", complete="checkpoints"),
]
AtSavepoint = Annotated[
    str | None, Option("At the checkpoint of this savepoint.", metavar="NAME", complete="savepoints")
]
Branch = Annotated[str, Argument("The branch's name.", metavar="BRANCH", complete="branches")]


class Parameter(NamedTuple):
    """An option with its type and default (`inspect.Parameter.empty`: it is required)."""

    name: str
    type: Any
    option: Option
    default: Any

    def is_of(self, face: str) -> bool:
        """Return whether commands, or jobs, have it."""
        return self.option.only in (None, face)


@dataclass(frozen=True)
class Here:
    """The pipeline on which an operation acts, and the face that asked for it.

    Attributes:
        face: COMMAND or JOB.
        by: The command or job as people know it: "weir seek", "seek job".
        waiting: Shows somebody, while its block lasts, what is waited for.
        dry_run: Only the plan is asked for.
        run: Runs the pipeline, and shows its epochs; None: whoever asks does not wait for that.
    """

    pipeline: Pipeline
    settings: Settings
    face: str
    by: str
    waiting: Callable[[str], AbstractContextManager[Any]]
    dry_run: bool = False
    run: Callable[[RunOptions], None] | None = None

    @property
    def name(self) -> str:
        """The pipeline, or branch, as commands take it."""
        return self.pipeline.title


@dataclass(frozen=True, slots=True)
class Rows:
    """Words in columns.

    Attributes:
        titles: What stands above the columns; empty: nothing.
        right: The titles of columns of numbers.
    """

    rows: Sequence[Sequence[str]]
    titles: Sequence[str] = ()
    right: Collection[str] = ()


class Labelled(NamedTuple):
    """A sentence below a word that says of what kind it is: an obstacle, a note."""

    label: str
    text: str


Words = Sequence[str | Rows | Labelled]


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes that an operation would make. It only reads up to here.

    Attributes:
        result: What `--json` prints if nothing is done.
        ask: The verb of the question whether to do it; None: nobody is asked.
        obstacles: Reasons not to do it, which somebody may accept.
        check: Raises an error for obstacles that are not accepted, given those that are.
    """

    result: Any
    words: Words
    ask: str | None = None
    obstacles: tuple[str, ...] = ()
    check: Callable[[Collection[str]], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of an operation.

    Attributes:
        result: What `--json` prints.
        notes: What only people who type a command are told besides, on stderr.
    """

    result: Any
    words: Words
    notes: Sequence[Labelled] = ()


Steps = Generator[Plan | Done, Collection[str], None]
"""A plan, if the operation has one, whose accepted obstacles are sent back. Then what was done, perhaps in parts, of
which the last has the result."""


def does(first: Plan | Done, steps: Steps) -> Iterator[Done]:
    """Yield what an operation has done behind its plan, part by part.

    Args:
        first: What it yielded first, if that was no plan, or for its plan.
    """
    for step in chain([first], steps):
        assert isinstance(step, Done), "a plan comes first, and once"
        yield step


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        steps: Takes `Here` and the options.
        result: The type of what `--json` prints; None: the command has no such option.
        job: What Dagster's job does, in a sentence; None: there is no such job.
        plans: It yields a plan first, so that it can be only shown.
        asks: A person who types the command is asked before something is done.
        accepts: Its plan may have obstacles.
    """

    steps: Callable[..., Steps]
    result: Any
    job: str | None = None
    plans: bool = False
    asks: bool = False
    accepts: bool = False

    @property
    def name(self) -> str:
        """The name of the command."""
        return self.steps.__name__

    @property
    def about(self) -> str:
        """The help of the command, each paragraph on one line: typer shows lines as they stand."""
        return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(self.steps) or "")

    @property
    def options(self) -> list[Parameter]:
        """The options in their order."""
        hints = get_type_hints(self.steps, include_extras=True)
        of = list(inspect.signature(self.steps).parameters.values())[1:]  # behind `here`
        listed = []
        for parameter in of:
            hint = hints[parameter.name]
            if get_origin(hint) is not Annotated:
                raise TypeError(f"{parameter.name} of the operation {self.name} has no Option.")
            kind, option = get_args(hint)[:2]
            listed.append(Parameter(parameter.name, kind, option, parameter.default))
        return listed


def operation(
    result: Any, *, job: str | None = None, plans: bool = False, asks: bool = False, accepts: bool = False
) -> Callable[[Callable[..., Steps]], Operation]:
    """Declare a function as an operation; the arguments are those of `Operation`."""
    return lambda steps: Operation(steps, result, job, plans, asks, accepts)
