"""Foreign errors on one line, and the page that helps."""

from __future__ import annotations

import errno

import pytest
from deltalake.exceptions import DeltaError

from configs.redaction import redacted, remember_variable, scrub
from configs.settings import PROJECT
from state_ops.errors import StageError, TransientError, first_line, page_about, plainly

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


# What libraries say, and what may stay of it. The canaries are secrets.
_GET = (
    "Error performing GET https://host/bucket/flights/t/_delta_log/0.json in 1ms - Server returned non-2xx status code"
)
SAID = [
    (
        f"{_GET}: 403 Forbidden: <?xml version='1.0'?>\n<Error><Code>AccessDenied</Code><Key>CANARY</Key>",
        f"{_GET}: 403 Forbidden (AccessDenied)",
    ),
    (
        f"{_GET}\n \x1b[31m↳\x1b[0m 503 Service Unavailable\n  \x1b[31m↳\x1b[0m <Error xmlns='x'><Code>SlowDown</Code>CANARY</Error>\n",
        f"{_GET}: 503 Service Unavailable (SlowDown)",
    ),
    (f"{_GET}: 400 Bad Request: authorization was CANARY", f"{_GET}: 400 Bad Request (the answer's text is left out)"),
    (f"{_GET}: 404 Not Found: No Body", f"{_GET}: 404 Not Found (no body)"),
    (
        "S3A: <ErrorResponse><Error><Code>InvalidClientTokenId</Code>CANARY</Error></ErrorResponse> (503)",
        "S3A: (InvalidClientTokenId) (503)",
    ),
    ("&lt;Error&gt;&lt;Code&gt;SlowDown&lt;/Code&gt;CANARY&lt;/Error&gt; on flights/x", "(SlowDown) on flights/x"),
    ("torn: k</Key><AWSAccessKeyId>CANARY", "torn: k</Key>"),
    ("PUT /b/k\nx-amz-security-token:CANARY\nhost:h", "PUT /b/k\nx-amz-security-token:***\nhost:h"),
    (
        "{'Authorization': 'AWS4-HMAC-SHA256 Credential=CANARY/2026/s3, SignedHeaders=host, Signature=CANARY'}",
        "{'Authorization': '***'}",
    ),
    (
        "sent AWS4-HMAC-SHA256 Credential=CANARY/2026/s3, SignedHeaders=host;date, Signature=CANARY to h",
        "sent *** to h",
    ),
    ("Authorization: Bearer CANARY0123.CANARY", "Authorization: ***"),
    (
        "https://b.host/flights/a.sst?X-Amz-Credential=CANARY%2F1&X-Amz-Signature=CANARY&list-type=2",
        "https://b.host/flights/a.sst?X-Amz-Credential=***&X-Amz-Signature=***&list-type=2",
    ),
    ("abfs://c/flights?sv=1&sig=CANARY%3D&se=2", "abfs://c/flights?sv=1&sig=***&se=2"),
    ("https://CANARY:CANARY@host:9000/bucket/key", "https://host:9000/bucket/key"),
    ('Config { access_key_id: Some("CANARY"), secret_access_key: Some(\\"CANARY\\"), region: "r" }', None),
    (
        "fs.s3a.secret.key=CANARY, fs.s3a.session.token: CANARY, AWSAccessKeyId=CANARY",
        "fs.s3a.secret.key=***, fs.s3a.session.token: ***, AWSAccessKeyId=***",
    ),
    ("no such key as ASIAIOSFODNN7CANARY0 here", "no such key as *** here"),
]


@pytest.mark.parametrize(("text", "stays"), SAID)
def test_of_what_a_library_says_status_code_and_path_stay_and_secrets_go(text, stays):
    told = redacted(text)
    assert "CANARY" not in told
    assert stays is None or told == stays
    assert redacted(told) == told
    assert (
        redacted(f"Tried in vain: {told}. Look at s3://bucket/x.") == f"Tried in vain: {told}. Look at s3://bucket/x."
    )


@pytest.mark.parametrize(
    "text",
    [
        "Unset it, or add session_token: {env: AWS_SESSION_TOKEN}.",
        "the key column 'token' is int64, and holds key: 17",
        "s3://bucket/a@b/c=1/part-0.parquet",
        "When reading information for key 'x' in bucket 'y': AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7",
        "syntax error at <Error, line 3",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


def test_the_values_of_variables_that_hold_secrets_go_wherever_they_stand(monkeypatch):
    remember_variable("WEIR_TEST_SECRET_OF_ERRORS")
    monkeypatch.setenv("WEIR_TEST_SECRET_OF_ERRORS", "sec/ret+0123")
    assert redacted("got sec/ret+0123 at /x?y=sec%2Fret%2B0123") == "got *** at /x?y=***"
    monkeypatch.setenv("WEIR_TEST_SECRET_OF_ERRORS", "short")
    assert redacted("a short path") == "a short path"


def test_errors_hold_no_secret_however_they_are_made():
    text = f"{_GET}: 403 Forbidden: <Error><Code>AccessDenied</Code>CANARY</Error>"
    error = TransientError(f"It failed: {text}", where=text, next=text)
    stage = StageError("It raised.", traceback=f"Traceback\nOSError: {text}")
    foreign = OSError(text)
    try:
        try:
            raise ValueError(text)
        except ValueError as inner:
            inner.add_note(text)
            raise foreign from inner
    except OSError as caught:
        scrub(caught)
    assert foreign.__cause__ is not None
    said = [str(error), repr(error), stage.traceback, plainly(DeltaError(text)), first_line(DeltaError(text))]
    said += [str(foreign), repr(foreign), str(foreign.__cause__), *foreign.__cause__.__notes__]
    assert all("CANARY" not in one and "AccessDenied" in one for one in said)
