"""Foreign errors on one line, and the page that helps."""

from __future__ import annotations

import errno

import pytest
from deltalake.exceptions import DeltaError

from configs.settings import PROJECT
from state_ops.errors import page_about, plainly

OF_DELTA = "Kernel error -> Generic S3 error\n  \x1b[31m↳\x1b[0m Error performing GET\n   \x1b[31m↳\x1b[0m 1, timeout\n"


def test_the_tree_and_the_colours_of_delta_are_gone():
    assert plainly(OSError(OF_DELTA)) == "OSError: Kernel error -> Generic S3 error Error performing GET 1, timeout"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/disk/file"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("Generic LocalFileSystem error: No space left on device (os error 28)"),
        DeltaError("... (os error 28)"),
    ],
)
def test_a_full_disk_is_told_from_a_store_that_is_away(error):
    assert page_about(error) == "docs/playbooks/disk-full.md"
    assert page_about(OSError(OF_DELTA)) == "docs/playbooks/storage-down.md"
    assert all((PROJECT / page_about(one)).exists() for one in (error, OSError()))
