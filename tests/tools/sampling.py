"""Which of many cases `make test` plays. The others have the mark `long` and are played by `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def sampled(cases: Iterable[Any], keep: int | Callable[[Any], bool] = 1) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, of which all but a sample are long.

    Args:
        cases: Values of one parameter, tuples of values of several, or `pytest.param`s.
        keep: How many of the first stay in `make test`, or which.
    """

    def stays(at: int, case: Any) -> bool:
        return at < keep if isinstance(keep, int) else keep(case)

    return [case if stays(at, case) else _long(case) for at, case in enumerate(cases)]


def rounds(number: int) -> pytest.MarkDecorator:
    """Rounds of a property test, with other examples each: `make test` plays one, `make test-long` the others."""
    return pytest.mark.parametrize("round_", sampled(range(number)))


def long_tests(*names: str) -> Callable[[type], type]:
    """For a class that inherits a suite: these of its tests are long in this class, and in no other."""

    def with_long(suite: type) -> type:
        for name in names:
            setattr(suite, name, pytest.mark.long(_again(getattr(suite, name))))
        return suite

    return with_long


def _again(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def again(*arguments: Any, **options: Any) -> None:
        test(*arguments, **options)

    return again


def _long(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return case._replace(marks=[*case.marks, pytest.mark.long])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
