"""The one S3 block of the settings, as each library that opens S3 wants it: obstore, delta-rs, pyarrow, Hadoop's S3A.

Secrets are references to environment variables until here. What travels (settings, pickled storage, Spark's
configuration) holds the references; each process looks its own environment up when it opens something. Nothing in this
module keeps a secret: it is returned to the caller, who hands it to the library.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow.fs as pafs

from state_ops.errors import ConfigurationError
from state_ops.s3_options import S3Options

SCHEMES = ("s3://", "s3a://")
_STANDARD = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_ENVIRONMENT_PROVIDER = "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider"
_REQUESTS_PER_TRANSFER = 20  # bounds one streamed download: this many times the longest silence


@dataclass(frozen=True, slots=True)
class Credentials:
    """Resolved secrets, for the moment in which a library is configured."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(repr=False)


def is_s3(uri: str) -> bool:
    return uri.startswith(SCHEMES)


def refuse_secrets(uri: str, where: str) -> str:
    """Return the URI if it holds no credentials, else ConfigurationError, which does not repeat them."""
    place, _, _ = uri.partition("?")
    authority = place.partition("://")[2].partition("/")[0]
    if is_s3(uri) and ("@" in authority or place != uri):
        raise ConfigurationError(
            "An s3:// URI holds credentials or options.",
            where=where,
            next="Write s3://bucket/prefix; storage.s3 says by reference where the keys are.",
        )
    return uri


def credentials(s3: S3Options) -> Credentials | None:
    """Return the credentials that the settings' references name in this process's environment.

    None: there are no references, so the libraries look for credentials themselves.

    Raises ConfigurationError that names a variable which is not set.
    """
    if s3.access_key_id is None or s3.secret_access_key is None:
        return None
    if s3.session_token is None and os.environ.get("AWS_SESSION_TOKEN"):
        # delta-rs and Spark's SDK would send it along with a key that it does not belong to.
        raise ConfigurationError(
            "AWS_SESSION_TOKEN is set, but storage.s3.session_token does not refer to it.",
            where="storage.s3",
            next="Unset it, or add session_token: {env: AWS_SESSION_TOKEN}.",
        )
    token = s3.session_token.secret("storage.s3.session_token") if s3.session_token else None
    return Credentials(
        s3.access_key_id.secret("storage.s3.access_key_id"),
        s3.secret_access_key.secret("storage.s3.secret_access_key"),
        token,
    )


def obstore_arguments(s3: S3Options, retries: int) -> dict[str, Any]:
    """Keyword arguments of obstore's S3Store.

    Args:
        retries: What the library itself tries again within one request.
    """
    keys = credentials(s3)
    arguments: dict[str, Any] = {
        "client_options": client_options(s3),
        "retry_config": retry_config(s3, retries),
        "conditional_put": "etag",
    }
    if keys is not None:
        answer = {"access_key_id": keys.key, "secret_access_key": keys.secret, "expires_at": None}
        if keys.token:
            answer["token"] = keys.token
        arguments["credential_provider"] = lambda: answer
    if s3.endpoint:
        arguments["endpoint"] = s3.endpoint
    if s3.region:
        arguments["region"] = s3.region
    return arguments


def client_options(s3: S3Options) -> dict[str, Any]:
    return {
        "allow_http": s3.allow_http,
        "connect_timeout": timedelta(seconds=s3.connect_timeout_seconds),
        "read_timeout": timedelta(seconds=s3.request_timeout_seconds),
        "timeout": timedelta(seconds=s3.request_timeout_seconds * _REQUESTS_PER_TRANSFER),
    }


def retry_config(s3: S3Options, retries: int) -> dict[str, Any]:
    return {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=s3.request_timeout_seconds * s3.max_attempts),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)},
    }


def delta_options(s3: S3Options) -> dict[str, str]:
    """Storage options of delta-rs. They hold secrets: pass them on, keep and log them nowhere."""
    options = {
        "aws_conditional_put": "etag",
        "allow_http": str(s3.allow_http).lower(),
        "connect_timeout": _milliseconds(s3.connect_timeout_seconds),
        "timeout": _milliseconds(s3.request_timeout_seconds),
        "max_retries": str(s3.max_attempts - 1),
        "retry_timeout": _milliseconds(s3.request_timeout_seconds * s3.max_attempts),
    }
    if s3.endpoint:
        options["aws_endpoint"] = s3.endpoint
    if s3.region:
        options["aws_region"] = s3.region
    keys = credentials(s3)
    if keys is not None:
        options |= {"aws_access_key_id": keys.key, "aws_secret_access_key": keys.secret}
        if keys.token:
            options["aws_session_token"] = keys.token
    return options


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def arrow_filesystem(s3: S3Options) -> pafs.S3FileSystem:
    """Return pyarrow's S3, with which sources are listed and their footers read."""
    keys = credentials(s3)
    secrets = {"access_key": keys.key, "secret_key": keys.secret, "session_token": keys.token} if keys else {}
    scheme, _, host = (s3.endpoint or "").rpartition("://")
    return pafs.S3FileSystem(
        region=s3.region or os.environ.get("AWS_REGION") or None,
        endpoint_override=host.rstrip("/") or None,
        scheme=scheme or "https",
        connect_timeout=s3.connect_timeout_seconds,
        request_timeout=s3.request_timeout_seconds,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=s3.max_attempts),
        **secrets,
    )


def hadoop_properties(s3: S3Options) -> dict[str, str]:
    """Spark properties for s3:// and s3a://. They hold no secret: PySpark puts them on a command line that all can
    see."""
    properties = {
        "fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        "fs.s3a.connection.establish.timeout": _milliseconds(max(15, s3.connect_timeout_seconds)),  # S3A takes no less
        "fs.s3a.connection.timeout": _milliseconds(s3.request_timeout_seconds),
        "fs.s3a.connection.ssl.enabled": str(not (s3.endpoint or "").startswith("http://")).lower(),
        "fs.s3a.attempts.maximum": str(s3.max_attempts),
        "fs.s3a.retry.limit": str(s3.max_attempts),
        "fs.s3a.endpoint.region": s3.region or os.environ.get("AWS_REGION") or "us-east-1",
    }
    if s3.endpoint:
        properties |= {"fs.s3a.endpoint": s3.endpoint, "fs.s3a.path.style.access": "true"}
    if s3.access_key_id is not None:
        properties["fs.s3a.aws.credentials.provider"] = _ENVIRONMENT_PROVIDER
    return {f"spark.hadoop.{key}": value for key, value in properties.items()}


def jvm_environment(s3: S3Options) -> dict[str, str]:
    """Variables for the environment of a JVM that reads S3: the only place where it gets secrets from."""
    keys = credentials(s3)
    if keys is None:
        return {}
    return {
        name: value
        for name, value in zip(_STANDARD, (keys.key, keys.secret, keys.token), strict=True)
        if value is not None
    }
