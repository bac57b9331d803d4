"""What keeps secrets out of the texts that people and logs see: one function, `redacted`, for every text from outside.

Servers answer a refused request with parts of that request. AWS's `SignatureDoesNotMatch` holds the id of the key, the session token
and everything that was signed; libraries copy the answer into their errors, and some print the URL or the options with which they were
called. So a text from outside is passed through here before it reaches a message, a log, the registry or Dagster:

- Of a server's answer, the HTTP status and the error's code stay. The rest goes, whatever it says.
- Elsewhere the values of request headers, of signed URLs' parameters and of options that are named like secrets go.
- The values of the environment variables that the settings refer to as secrets go wherever they stand.

Everything else stays: paths, URLs, and what the library itself has to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from http import HTTPStatus
from typing import ParamSpec, TypeVar
from urllib.parse import quote

__all__ = ["error_code", "error_status", "redacted", "remember_variable", "scrub", "scrubbed", "scrubbing"]

Params = ParamSpec("Params")
Result = TypeVar("Result")

_GONE = "***"
_SHORTEST = 8  # characters of a value that is searched for: a shorter one would be found in words and paths

_PHRASES = "|".join(sorted({re.escape(status.phrase) for status in HTTPStatus}, key=len, reverse=True))
_BETWEEN = r"(?:\x1b\[[0-9;]*m|[\s:↳])*+"  # how obstore writes it, and how delta-rs draws it
# Its answer ends where the text does: what is written after "(...)" is ours, so a text may be redacted twice.
_ANSWER = re.compile(
    rf"(non-2xx status code){_BETWEEN}(\d{{3}})(?: ({_PHRASES}))?+{_BETWEEN}(?!\s*\()(\S.*)\Z",
    re.DOTALL | re.IGNORECASE,
)
_STATUS = re.compile(rf"non-2xx status code{_BETWEEN}(\d{{3}})", re.IGNORECASE)
_CODE = re.compile(r"(?:<|&lt;)Code(?:>|&gt;)(\w{1,64})(?:<|&lt;)/")
_LT, _GT = r"(?:<|&lt;)", r"(?:>|&gt;)"
_DOCUMENT = re.compile(
    rf"(?:{_LT}\?xml.*?\?{_GT}\s*)?{_LT}(Error|ErrorResponse)(?:\s.*?)?{_GT}.*?(?:{_LT}/\1{_GT}|\Z)", re.DOTALL
)
_ELEMENT = re.compile(
    rf"{_LT}((?:AWSAccessKeyId|SignatureProvided|StringToSign(?:Bytes)?|CanonicalRequest(?:Bytes)?|Token-\d+|AuthenticationErrorDetail"
    rf"|AccessKeyId|SecretAccessKey|SessionToken))(?:\s.*?)?{_GT}.*?(?:{_LT}/\1{_GT}|\Z)",
    re.DOTALL,
)
_SIGNED = re.compile(r"AWS4-HMAC-SHA256(?:\\n|\s)+\d{8}T\d{6}Z(?:\\n|\s)+\S*?aws4_request(?:\\n|\s)+[0-9a-f]{64}")
_AUTHORIZATION = re.compile(
    r"(?:AWS4-HMAC-SHA256|\bAWS4-ECDSA-P256-SHA256)\s+Credential=[^\s,]+(?:,?\s*(?:SignedHeaders|Signature)=[^\s,\"'}\\]+)*"
    r"|\bBearer\s+[\w.~+/=-]{8,}"
)
_IS = r"[\\]*+[\"']?+\s*+(?:=>|[:=])\s*+(?:Some\()?+[\\]*+[\"']?+"
_BARE = r"[^\s\"',;&<>(){}\[\]\\]"
_VALUE = rf"(?!\*\*\*)(?:(?<=\")[^\"]+|(?<=')[^']+|{_BARE}+)"
_HEADER = re.compile(
    rf"(?i)(?<![\w-])((?:(?:proxy-)?authorization|(?:set-)?cookie|x-(?:amz|ms|goog)-[\w-]+){_IS})"
    rf"(?:(?:Bearer|Basic|AWS|SharedKey)\s++)?+{_VALUE}"
)
_SENTENCE = r"(?<=: )[a-z]+ [a-z]+ "  # `secret_access_key: must be a reference` is a message
_OPTION = re.compile(
    r"(?i)((?:access[._-]?key(?:[._-]?id)?|secret[._-]?(?:access[._-]?)?key|account[._-]?key|(?:session|security|sas)[._-]?token"
    rf"|client[._-]?secret|private[._-]?key|api[._-]?key|password|passwd){_IS})(?!{_SENTENCE}){_VALUE}"
)
_PARAMETER = re.compile(r"(?i)((?:[?&](?:sig|token)|signature|credential)=)(?!\*\*\*)[^&\s\"'<>,\\]+")
_USER = re.compile(r"(://)[^/\s:@\"']+(?::[^/\s@\"']*)?@")
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{12,}\b")

_variables = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}


def remember_variable(name: str) -> None:
    """Let `redacted` remove the value of this environment variable, whatever it is at the time. Nothing but the name is kept."""
    _variables.add(name)


def redacted(text: str) -> str:
    """The text without credentials, tokens, signatures, what was signed, and request headers; with status, code, paths and the rest."""
    for value in _secrets():
        text = text.replace(value, _GONE)
    text = _ANSWER.sub(_without_body, text)
    text = _DOCUMENT.sub(lambda answer: f"({error_code(answer[0]) or 'an answer that is left out'})", text)
    text = _ELEMENT.sub("", text)
    for pattern in (_SIGNED, _AUTHORIZATION, _KEY_ID):
        text = pattern.sub(_GONE, text)
    for pattern in (_HEADER, _OPTION, _PARAMETER):
        text = pattern.sub(rf"\1{_GONE}", text)
    return _USER.sub(r"\1", text)


def error_status(text: str) -> str | None:
    """The HTTP status of which an error of obstore or delta-rs speaks."""
    status = _STATUS.search(text)
    return status[1] if status else None


def error_code(text: str) -> str | None:
    """The code in a server's XML answer."""
    code = _CODE.search(text)
    return code[1] if code else None


def scrub(error: BaseException) -> None:
    """Redact what an error says, and all that it was raised from or beside, in place: traces show those too."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.args = tuple(redacted(value) if isinstance(value, str) else value for value in current.args)
        for name, value in list(vars(current).items()):
            if isinstance(value, str):
                setattr(current, name, redacted(value))
        notes = getattr(current, "__notes__", None)
        if notes:
            current.__notes__ = [redacted(note) for note in notes]
        waiting += [current.__cause__, current.__context__]


@contextmanager
def scrubbing() -> Iterator[None]:
    """Around calls of a library whose errors copy what a server has answered: they come through, scrubbed."""
    try:
        yield
    except Exception as error:
        scrub(error)
        raise


def scrubbed(call: Callable[Params, Result]) -> Callable[Params, Result]:
    """The same function, `scrubbing` around it."""

    @wraps(call)
    def scrubbed_call(*args: Params.args, **options: Params.kwargs) -> Result:
        with scrubbing():
            return call(*args, **options)

    return scrubbed_call


def _without_body(answer: re.Match[str]) -> str:
    words, status, phrase, body = answer.groups()
    left = error_code(body) or ("no body" if body.strip() == "No Body" else "the answer's text is left out")
    return f"{words}: {' '.join(filter(None, (status, phrase)))} ({left})"


def _secrets() -> list[str]:
    """The values that must not be shown, the longest first; also as URLs have them."""
    values = {os.environ.get(name, "") for name in _variables}
    values |= {quote(value, safe="") for value in values}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)
