"""The access to S3, as the state engine asks for it: the settings have an object of this form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SecretReference(Protocol):
    """The place of a secret."""

    def secret(self, where: str) -> str:
        """Return the secret. Raises ConfigurationError, which names `where`, if this process does not have it."""
        ...


class S3Options(Protocol):
    """The access to S3. `S3Defaults` has it without any setting."""

    @property
    def endpoint(self) -> str | None:
        """URL of the service; None: AWS's own for the region."""

    @property
    def region(self) -> str | None:
        """None: what AWS_REGION says, else us-east-1."""

    @property
    def access_key_id(self) -> SecretReference | None:
        """None: each library looks for credentials itself."""

    @property
    def secret_access_key(self) -> SecretReference | None: ...

    @property
    def session_token(self) -> SecretReference | None: ...

    @property
    def allow_http(self) -> bool:
        """True if the endpoint may be one without TLS."""

    @property
    def connect_timeout_seconds(self) -> float: ...

    @property
    def request_timeout_seconds(self) -> float:
        """Longest silence within one request."""

    @property
    def max_attempts(self) -> int:
        """Tries of a request that is throttled or times out."""

    @property
    def transfers(self) -> int:
        """Files that one subtask transfers at a time."""


@dataclass(frozen=True)
class S3Defaults:
    """The values that hold if the settings say nothing."""

    endpoint: str | None = None
    region: str | None = None
    access_key_id: SecretReference | None = None
    secret_access_key: SecretReference | None = None
    session_token: SecretReference | None = None
    allow_http: bool = False
    connect_timeout_seconds: float = 5
    request_timeout_seconds: float = 30
    max_attempts: int = 5
    transfers: int = 4
