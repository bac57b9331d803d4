"""Foreign errors on one line, and the page that helps."""

from __future__ import annotations

import errno
import time
from itertools import pairwise

import pytest
from deltalake.exceptions import DeltaError

from state_ops.errors import StageError, TransientError, first_line, page_about, plainly
from state_ops.redaction import redacted, remember_variable, scrub
from weir.settings.configuration import PROJECT

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
    assert all((PROJECT / page_about(failure)).exists() for failure in (error, OSError()))


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
        (
            f"{_GET}\n \x1b[31m↳\x1b[0m 503 Service Unavailable\n  \x1b[31m↳\x1b[0m <Error"
            " xmlns='x'><Code>SlowDown</Code>CANARY</Error>\n"
        ),
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
    (
        f"{_GET}: 403 Forbidden: CANARY\nCANARY\n\nThe above exception was the direct cause of\n  File 'x.py', line 3",
        (
            f"{_GET}: 403 Forbidden (the answer's text is left out)\n\nThe above exception was the direct cause of\n "
            " File 'x.py', line 3"
        ),
    ),
    (
        f"{_GET}: 403 Forbidden: <Error><Code>AccessDenied</Code>CANARY</Error>\n\nDebug source:\nGeneric",
        f"{_GET}: 403 Forbidden (AccessDenied)\n\nDebug source:\nGeneric",
    ),
    (
        "fs.azure.account.key.acc.dfs.core.windows.net=CANARY0==, fs.azure.sas.box.acc: CANARY",
        "fs.azure.account.key.acc.dfs.core.windows.net=***, fs.azure.sas.box.acc: ***",
    ),
    (
        "fs.azure.account.oauth2.client.secret.acc.dfs.core.windows.net: CANARY",
        "fs.azure.account.oauth2.client.secret.acc.dfs.core.windows.net: ***",
    ),
    (
        "AccountName=a;AccountKey=CANARY==;EndpointSuffix=core.windows.net",
        "AccountName=a;AccountKey=***;EndpointSuffix=core.windows.net",
    ),
    ("GET\nAuthorization: AWS CANARY:CANARY/+0=\nhost: h", "GET\nAuthorization: ***\nhost: h"),
    ("authorization: SharedKey acc:CANARY= to h", "authorization: *** to h"),
    ('Authorization: Digest username="CANARY", response="CANARY"\nhost: h', "Authorization: ***\nhost: h"),
    ("Cookie: a=CANARY; b=CANARY\nhost: h", "Cookie: ***\nhost: h"),
    ("[('Authorization', 'Basic CANARY'), ('host', 'h')]", "[('Authorization', '***'), ('host', 'h')]"),
    ("[(b'X-Amz-Security-Token', b'CANARY')]", "[(b'X-Amz-Security-Token', b'***')]"),
    ("sent AWS AAAAAAAAACANARY0:CANARYCANARYCANARYCANARY= to h", "sent *** to h"),
    ('{"Token": "CANARY", "Code": "Success"}', '{"Token": "***", "Code": "Success"}'),
    (
        'AwsCredential { key_id: "CANARY", secret_key: "CANARY", token: Some("CANARY") }',
        'AwsCredential { key_id: "***", secret_key: "***", token: Some("***") }',
    ),
    (
        '{"access_token":"CANARY","refresh_token": "CANARY","id_token":"CANARY"}',
        '{"access_token":"***","refresh_token": "***","id_token":"***"}',
    ),
    ("refreshToken=CANARY, GITHUB_TOKEN=CANARY0123", "refreshToken=***, GITHUB_TOKEN=***"),
    ("with bearer CANARY0123 to h", "with *** to h"),
    ("with eyJCANARYCANARY.eyJCANARYCANARY.CANARY to h", "with *** to h"),
    ("-----BEGIN RSA PRIVATE KEY-----\nCANARY\n-----END RSA PRIVATE KEY-----, of h", "***, of h"),
    ("ran --password CANARY --user u, --api-key=CANARY", "ran --password *** --user u, --api-key=***"),
    ("password := CANARY, password -> CANARY, password == CANARY", "password := ***, password -> ***, password == ***"),
    ("password='CANARY and CANARY', user='u'", "password='***', user='u'"),
    ('{"password": "CANARY \\"and\\" CANARY"}', '{"password": "***"}'),
    (
        'Some("{\\"password\\": \\"CANARY and CANARY\\", \\"user\\": 1}")',
        'Some("{\\"password\\": \\"***\\", \\"user\\": 1}")',
    ),
    ("password: 'CANARY and what was cut off\nhost: h", "password: '***\nhost: h"),
    (
        (
            f"{_GET}: 500 Internal Server Error: java.io.IOException: denied\n\tat"
            " org.store.Auth.check(Auth.java:10)\nSigned: CANARY"
        ),
        f"{_GET}: 500 Internal Server Error (the answer's text is left out)",
    ),
    (f"{_GET}: 403 Forbidden: (CANARY)", f"{_GET}: 403 Forbidden (the answer's text is left out)"),
    ('"password":\n    "CANARY"', '"password":\n    "***"'),
    ("password=\n  CANARY", "password=\n  ***"),
    ('password=" CANARY", user="u"', 'password="***", user="u"'),
    ("cookie: the id=5; sid=CANARY\nhost: h", "cookie: ***\nhost: h"),
    ("x-amz-security-token: string+CANARY", "x-amz-security-token: ***"),
    ("user/password=CANARY", "user/password=***"),
    ("(https://h/p/password=CANARY)", "(https://h/p/password=***)"),
    ("redis://:CANARY@host:6379/0, amqp://u:CAN@CANARY@h/v", "redis://host:6379/0, amqp://h/v"),
    ("https://CANARY@host/x", "https://host/x"),
    ("postgresql://u:p@ss/CANARY@db", "postgresql://db"),
    ("postgresql+psycopg2://u:CANARY/CAN@CANARY@db.x:5432/d?ssl=1", "postgresql+psycopg2://db.x:5432/d?ssl=1"),
    ("jdbc:mysql://u:CANARY/CANARY@[::1]:3306/d, redis://:CANARY/@h/0", "jdbc:mysql://[::1]:3306/d, redis://h/0"),
    ("dsn=u:CANARY@tcp(db:3306)/d?tls=true", "dsn=tcp(db:3306)/d?tls=true"),
    ('"u:CAN@/:CANARY@unix(/run/my.sock)/d"', '"unix(/run/my.sock)/d"'),
    ("mysql://u:CANARY@tcp(db:3306)/d", "mysql://tcp(db:3306)/d"),
    ("jdbc:oracle:thin:u/CANARY@//h:1521/x", "jdbc:oracle:thin://h:1521/x"),
    ("jdbc:postgresql://h/d?user=u&password=CANARY&ssl=true", "jdbc:postgresql://h/d?user=u&password=***&ssl=true"),
]


@pytest.mark.parametrize(("text", "stays"), SAID)
def test_of_what_a_library_says_status_code_and_path_stay_and_secrets_go(text, stays):
    text_shown = redacted(text)
    assert "CANARY" not in text_shown
    assert stays is None or text_shown == stays
    assert redacted(text_shown) == text_shown
    assert (
        redacted(f"Tried in vain: {text_shown}. Look at s3://bucket/x.")
        == f"Tried in vain: {text_shown}. Look at s3://bucket/x."
    )


# Beginnings of what rules look for, none of which ends.
_HOSTILE = [
    "<Error ",
    "<Error><Code>",
    "<?xml version='1.0'",
    "<?xml?><Error><Code>",
    "&lt;Error a=&quot;",
    "<AWSAccessKeyId ",
    "<StringToSign>",
    "non-2xx status code: 403 Forbidden: <Error><Code>\nTraceback (most recent",
    "non-2xx status code: 403 ",
    "AWS4-HMAC-SHA256\\n20250101T000000Z\\n",
    "AWS4-HMAC-SHA256 Credential=a, ",
    "Bearer ",
    "eyJaaaaaaaaa-",
    "-----BEGIN PRIVATE KEY",
    "Cookie: a=b; ",
    'Authorization: a b="',
    "x-amz-",
    "fs.azure.account.key.",
    "token=",
    "password='",
    'password: \\"',
    "\\",
    "('token', '",
    "--a",
    "--password ",
    "?sig=",
    "://a:",
    "://",
    "jdbc:oracle:thin:a/",
    "mysql://a:/",
    "a:@tcp",
    "a@",
]


@pytest.mark.parametrize(
    "text",
    [
        "Unset it, or add session_token: {env: AWS_SESSION_TOKEN}.",
        "the key column 'token' is int64, and holds key: 17",
        "s3://bucket/a@b/c=1/part-0.parquet",
        (
            "When reading information for key 'x' in bucket 'y': AWS Error NETWORK_CONNECTION during HeadObject"
            " operation: curlCode: 7"
        ),
        "syntax error at <Error, line 3",
        "got <Error object at 0x7f> and not <b>",
        "abfss://container@account.dfs.core.windows.net/flights/a.parquet, wasbs://c@a.blob.core.windows.net/b",
        "s3://bucket/password=2024/token=7/part-0.parquet",
        "api_key: Annotated[str, Field()], password: str, token: SecretStr | None",
        "root\n |-- token: string (nullable = true)\n |-- password: string",
        "secret_access_key: Input should be a valid dictionary",
        "secret_access_key: must be a reference",
        "password=None, token: null, secret_key=${SECRET}",
        "a non-2xx status code 404 means that it is not there: look at the path",
        "a non-2xx status code: see the log",
        "Unexpected token: 'FROM' at 1:2 and next_token: 1ueGcxLPRx1Tr",
        "the row {'key_id': 17, 'secret': None}",
        "bearer authentication is required, and the option 'password=' is not known: it's 'x'",
        "def call(signature: Signature, credentials: list[str])",
        "http://host:9000/bucket/a@b",
        "postgresql://db:5432/d?application_name=weir, then mail@example.org",
        "listening at tcp(0.0.0.0:3306): connect to it@tcp(host)",
        "struct<id:bigint,password:string,token:string>",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


@pytest.mark.parametrize("fragment", [*_HOSTILE, *map("".join, pairwise(_HOSTILE))])
def test_a_text_that_is_made_to_take_long_does_not(fragment):
    text = fragment * (80_000 // len(fragment))
    started = time.thread_time()
    redacted(text)
    assert time.thread_time() - started < 3  # some 0.05 s; what is quadratic takes half a minute and more


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
    texts = [str(error), repr(error), stage.traceback, plainly(DeltaError(text)), first_line(DeltaError(text))]
    texts += [str(foreign), repr(foreign), str(foreign.__cause__), *foreign.__cause__.__notes__]
    assert all("CANARY" not in text_shown and "AccessDenied" in text_shown for text_shown in texts)
