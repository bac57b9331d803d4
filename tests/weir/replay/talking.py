"""The small pipeline with functions that say what they have seen, everywhere that something can be said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

import polars as pl

from tests.recovery import small
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, expect

SECRET = "k7"  # a key of the small pipeline


def talks(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Prints, logs and warns of a value, and lets another process do it."""
    print("printed:", SECRET)
    print("to stderr:", SECRET, file=sys.stderr)
    os.write(1, f"by the descriptor: {SECRET}\n".encode())
    logging.getLogger("author").warning("logged: %s", SECRET)
    warnings.warn(f"warned: {SECRET}", stacklevel=1)
    subprocess.run(["sh", "-c", f"echo another process: {SECRET}; echo {SECRET} >&2"], check=True)
    return small.accounts(rows, state, epoch)


def raises(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Raises an error that quotes a value."""
    if rows.height:
        raise ValueError(f"{SECRET} is too much")
    return small.accounts(rows, state, epoch)


def leaves(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Ends Python with a value."""
    if rows.height:
        sys.exit(f"because of {SECRET}")
    return small.accounts(rows, state, epoch)


_warns = expect("ExpectColumnValuesToBeInSet", column="id", value_set=["k1"], on_failure="warn")
pipeline = Pipeline("small", (altered(small.accounts, function=talks, gates=(_warns,)),), max_parallelism=8)
raising = Pipeline("small", (altered(small.accounts, function=raises),), max_parallelism=8)
leaving = Pipeline("small", (altered(small.accounts, function=leaves),), max_parallelism=8)
