"""The errors that the contract suites expect. Nothing here needs pytest until a test is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from state_ops.errors import WeirError

Result = TypeVar("Result")


class Caught:
    """The error that `raises` has caught."""

    error: WeirError


@contextmanager
def raises(*kinds: type[WeirError], passes: bool = False) -> Iterator[Caught]:
    """Fail unless the block raises one of these errors.

    Args:
        passes: Or none.
    """
    caught = Caught()
    try:
        yield caught
    except kinds as error:
        caught.error = error
        return
    assert passes, f"nothing was raised, but {' or '.join(kind.__name__ for kind in kinds)} should be"


def able(action: Callable[[], Result]) -> Result:
    """Return the action's result; skip the test if the system cannot do it."""
    import pytest

    try:
        return action()
    except NotImplementedError:
        pytest.skip(f"the system under test has no {getattr(action, '__name__', action)}")


def is_clear(error: WeirError, secrets: Iterable[str]) -> None:
    """Fail unless the error says what and where, and shows no secret."""
    assert error.what and error.where, f"{error!r} does not say what and where"
    without_secrets(secrets, str(error), repr(error), repr(error.__cause__))


def without_secrets(secrets: Iterable[str], *texts: str) -> None:
    """Fail if one of the texts holds a secret."""
    for secret in secrets:
        assert not any(secret in text for text in texts), "a secret is shown"
