"""Loading Great Expectations, which takes seconds, beside the first Spark job."""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import Any

from pipelines.runtime.execution.spark.imports import load_great_expectations
from pipelines.runtime.execution.spark.spark_session import name_main_module
from state_ops import extras

_loading = threading.Lock()


def load() -> tuple[Any, Any]:
    """Great Expectations, and the batch definition that gates are evaluated on; takes seconds, once a process.

    Safe from any thread.
    """
    with _loading:
        return _loaded()


def load_meanwhile() -> None:
    """Start to load Great Expectations beside a Spark job.

    It does not begin earlier: Great Expectations imports PySpark too, so Spark would start seconds later.
    """
    if not _loaded.cache_info().currsize:
        threading.Thread(target=load, name="weir-gates", daemon=True).start()


@functools.cache
def _loaded() -> tuple[Any, Any]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    name_main_module()
    with extras.needed_for("A quality gate"):
        load_great_expectations()
        import great_expectations as gx

    # This module of theirs sets its own level, and then says where it would put pages that are never made.
    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}  # type: ignore[assignment]
    asset = context.data_sources.add_pandas("weir").add_dataframe_asset("epoch")
    return gx, asset.add_batch_definition_whole_dataframe("epoch")
