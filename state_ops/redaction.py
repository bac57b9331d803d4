"""Secrets are removed here from the texts that people and logs see: one function, `redacted`, for every text that comes
from outside.

Servers answer a refused request with parts of that request. AWS's `SignatureDoesNotMatch` holds the id of the key, the
session token and everything that was signed. Libraries copy the answer into their errors, and some print the URL or the
options with which they were called. So a text from outside passes through here before it reaches a message, a log, the
registry or Dagster:

- Of a server's answer, the HTTP status and the error's code stay. The rest goes, whatever it says.
- Elsewhere `RULES` says what goes: the values of request headers, of parameters of signed URLs, and of options that are
named like secrets.
- The values of the environment variables that the settings refer to as secrets go wherever they stand. So do secrets of
connections that stand in the settings themselves.

Everything else stays: paths, URLs, and what the library itself has to say. Each rule takes time that is linear in the
length of the text: a server may answer with anything, and a message must not keep a run waiting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from http import HTTPStatus
from typing import ParamSpec, TypeVar
from urllib.parse import quote

__all__ = [
    "RULES",
    "Rule",
    "error_code",
    "error_status",
    "redacted",
    "remember_value",
    "remember_variable",
    "scrub",
    "scrubbed",
    "scrubbing",
]

Params = ParamSpec("Params")
Result = TypeVar("Result")

_GONE = "***"
_SHORTEST = 8  # characters of a value that is searched for: a shorter one would be found in words and paths


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of text that holds secrets.

    Attributes:
        purpose: What the rule is for.
        pattern: What it finds, in capitals or not. It begins at a word that is rare, and repeats nothing that could
            begin at many places of the same text.
        put: What stands there afterwards, as `re.sub` takes it.
    """

    purpose: str
    pattern: str
    put: str | Callable[[re.Match[str]], str] = _GONE

    def applied(self, text: str) -> str:
        """Return the text without what the rule finds."""
        return _compiled(self.pattern).sub(self.put, text)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a rule's pattern as `re` wants it, made when the first text is looked through: all of them take longer
    than `weir --help`."""
    return re.compile(pattern, re.DOTALL | re.IGNORECASE)


# A server's answer. Where it does not end by itself, it ends with the text, or where a trace of Python's begins or goes
# on. A trace of Java's may be a part of the answer.
_LT, _GT = r"(?:<|&lt;)", r"(?:>|&gt;)"
_ATTRIBUTES = r"(?:\s(?:[^<>&]|&quot;)*+)?"  # reads up to the next tag and no further, so that it stays linear
_TRACE = r"\n{1,3}[ \t]{0,20}(?:Traceback \(most recent|The above exception|During handling)"
_END = rf"(?={_TRACE})|\Z"
_PHRASES = "|".join(sorted({re.escape(status.phrase) for status in HTTPStatus}, key=len, reverse=True))
_COLOUR = r"\x1b\[[0-9;]{0,20}m"
_BETWEEN = rf"(?:{_COLOUR}|[\s:↳])*+"  # how obstore writes it, and how delta-rs draws it
_STATUS = re.compile(rf"non-2xx status code{_BETWEEN}(\d{{3}})", re.IGNORECASE)
_ROOT = rf"(?:{_LT}\?xml(?:[^<>&?]|&quot;)*+\?{_GT}\s*+)?+{_LT}(?P<root>Error|ErrorResponse){_ATTRIBUTES}{_GT}"
_CHILD = rf"(?=\s*+{_LT}[a-z]\w{{0,64}}{_GT}|[^<&]*+{_LT}/)"
_CODE = re.compile(rf"{_LT}Code{_GT}(\w{{1,64}}){_LT}/")

# A name and its value: `name=value`, `name: "value"`, `"name" => Some(\"value\")`, `--name value`, `('name',
# b'value')`.
_OPENING = r"(?:Some\(|\[)?+(?:[bfru]?[\\]*+[\"'])?+"
# A value may stand in the next line where it is quoted, or after an equals sign.
_GAP = r"(?:\s{0,40}+(?=[\\]*+[\"'])|(?<==)\s{0,40}+|[^\S\n]*+)"
_IS = rf"[\\]*+[\"']?+[^\S\n]*+(?>=>|->|:=|==?|:){_GAP}{_OPENING}"
_BARE = r"[^\s\"',;&<>(){}\[\]\\]++"
_QUOTED = (
    r"(?<=\\\")(?:[^\"\\]++|\\++(?!\"))++|(?<=\\')(?:[^'\\]++|\\++(?!'))++"
    r"|(?<=\")\s++[^\"\n]++(?=\"\s*+(?:[,;)}\]\n]|\Z))|(?<=')\s++[^'\n]++(?='\s*+(?:[,;)}\]\n]|\Z))"
    r"|(?<=\")(?!\s)(?:(?:[^\"\\]++|\\.)++(?=\")|[^\"\n]++)|(?<=')(?!\s)(?:(?:[^'\\]++|\\.)++(?=')|[^'\n]++)"
)
# What may stand after a name and is no value: a sentence about it, its type, a reference, nothing, and what is gone
# already.
_WORDS = (
    r"an?|are|cannot|denied|expected|extra|failed|field|has|input|invalid|is|it|may|missing|must|no|not|required|set|should"
    r"|string|the|value|was"
)
_TYPES = (
    r"Annotated|Any|Final|Literal|Mapping|Option|Optional|SecretStr|Sequence|State|Union|array|bigint|binary|bool|bytes|dict|double"
    r"|float\d*|u?int\d*|large_(?:binary|string)|list|map|set|str|string|struct|timestamp|tuple|utf8|varchar"
)
_WHOLE = r"(?![\w.~+/=-])"
_IS_NO_VALUE = (
    rf"(?!\*\*\*|\$\{{|(?:none|null|nil|true|false){_WHOLE}"
    rf"|(?<=: )(?:(?:{_WORDS}) [a-z]|(?:{_TYPES}){_WHOLE})|(?<=:)(?:{_TYPES}){_WHOLE})"
)
_IS_GONE = r"(?!\*\*\*|\$\{)"  # of a header's value: nobody writes its type beside it
_VALUE = rf"{_IS_NO_VALUE}(?:{_QUOTED}|(?<![\"']){_BARE})"
# A header's: `AWS id:signature`, `Digest username="u", response="r"`.
_PART = rf"(?:[\w.~+/-]++=)?(?:\"[^\"\n]*+\"|{_BARE})"
_CREDENTIALS = (
    rf"{_IS_GONE}(?:{_QUOTED}|(?<![\"'])(?:[a-z][\w-]*+["
    rf" \t]++)?{_PART}(?:[,;]\s*+[\w.-]++=(?:\"[^\"\n]*+\"|{_BARE}))*+)"
)

# Names. `/password=2024/` in a path is a partition of a table.
_NAME = r"(?<![\w.-])(?=[\w.-]++[\\]*+[\"']?+\s*+[:=-])(?!(?<=/)[\w.-]++=[^\s=\"'/&,;]++/)[\w.-]*?"
_SUFFIX = r"(?:\.[\w.-]{1,200}+)?"  # Hadoop's options for Azure end with the account
_SECRET = (
    rf"(?:access[._-]?key(?:[._-]?id)?|account[._-]?key{_SUFFIX}|api[._-]?key|client[._-]?secret{_SUFFIX}|pass(?:wd|word|phrase)"
    rf"|private[._-]?key|secret[._-]?(?:access[._-]?)?key|azure\.sas{_SUFFIX}|shared[._-]?access[._-]?signature"
    r"|(?:access|auth|bearer|id|refresh|sas|security|session)[._-]?token)"
)
# Names that other things have too: parsers speak of tokens, and a listing goes on at one.
_MAYBE_SECRET = (
    r"(?<![^\W_])(?:(?<!unexpected )(?<!unknown )(?<!invalid )(?<!next[._-])(?<!continuation[._-])token"
    r"|credentials?|key[._-]?id|pwd|secret|signature)"
)
_HEADER = r"(?:(?:proxy-)?authorization|(?:set-)?cookie|x-(?:amz|ms|goog)-[\w-]++)"

_DATABASES = (
    "amqps?|clickhouse|cockroachdb|mariadb|mongodb|mssql|mysql|oracle"
    "|postgres(?:ql)?|rediss?|redshift|snowflake|sqlserver"
)


def _without_body(answer: re.Match[str]) -> str:
    body = answer["body"]
    left = error_code(body) or ("no body" if body == "No Body" else "the answer's text is left out")
    return f"{answer['words']}: {' '.join(filter(None, (answer['status'], answer['phrase'])))} ({left})"


def _only_code(document: re.Match[str]) -> str:
    return f"({error_code(document[0]) or 'an answer that is left out'})"


RULES = (
    Rule(
        "what a server has answered, as obstore and delta-rs say it",
        rf"(?P<words>non-2xx status code){_BETWEEN}(?P<status>\d{{3}})(?:"
        rf" (?P<phrase>{_PHRASES}))?+(?=(?:{_COLOUR}|\s)*+[:↳]){_BETWEEN}"
        rf"(?P<body>No Body\b|{_ROOT}.*?(?:{_LT}/(?P=root){_GT}(?:\s+\Z)?|{_END})|\S.*?(?:{_END}))",
        _without_body,
    ),
    Rule("an answer in XML wherever it stands", rf"{_ROOT}{_CHILD}.*?(?:{_LT}/(?P=root){_GT}|{_END})", _only_code),
    Rule(
        "a part of such an answer whose beginning is cut off",
        rf"{_LT}(AWSAccessKeyId|SignatureProvided|StringToSign(?:Bytes)?|CanonicalRequest(?:Bytes)?|Token-\d+|AuthenticationErrorDetail"
        rf"|AccessKeyId|SecretAccessKey|SessionToken){_ATTRIBUTES}{_GT}.*?(?:{_LT}/\1{_GT}|{_END})",
        "",
    ),
    Rule(
        "what AWS has a request signed over",
        r"AWS4-HMAC-SHA256(?:\\n|\s)++\d{8}T\d{6}Z(?:\\n|\s)++\S{0,200}?aws4_request(?:\\n|\s)++[0-9a-f]{64}",
    ),
    Rule(
        "AWS' credentials outside of their header",
        r"AWS4-(?:HMAC|ECDSA-P256)-SHA256\s++Credential=[^\s,]++(?:,?\s*+(?:SignedHeaders|Signature)=[^\s,\"'}\\]++)*+"
        r"|\bAWS [A-Z0-9]{16,64}:[\w+/]{20,}=*+",
    ),
    Rule("a bearer's token", r"\bBearer\s++(?:(?=[a-z.~+/=_-]*+\d)[\w.~+/=-]{8,}|[\w.~+/=-]{20,})"),
    Rule("the id of a key of AWS", r"\b(?-i:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])(?-i:[A-Z0-9]{12,})\b"),
    Rule("a JSON web token", r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*+)?"),
    Rule(
        "a private key",
        rf"-----BEGIN [A-Z ]{{0,30}}PRIVATE KEY-----.*?(?:-----END [A-Z ]{{0,30}}PRIVATE KEY-----|{_END})",
    ),
    Rule(
        "a header with credentials",
        rf"((?<![\w-])(?:(?:proxy-)?authorization|(?:set-)?cookie){_IS}){_CREDENTIALS}",
        rf"\1{_GONE}",
    ),
    Rule(
        "a header of a store",
        rf"((?<![\w-])x-(?:amz|ms|goog)-[\w-]++{_IS}){_IS_GONE}(?:{_QUOTED}|(?<![\"']){_BARE})",
        rf"\1{_GONE}",
    ),
    Rule("an option that is named like a secret", rf"({_NAME}{_SECRET}{_IS}){_VALUE}", rf"\1{_GONE}"),
    Rule(
        "an option that is perhaps a secret: quoted, or long and with a digit",
        rf"({_NAME}{_MAYBE_SECRET}{_IS})(?:(?<=[\"'])|(?=\S{{8}})(?=[^\s\d]{{0,64}}\d)){_VALUE}",
        rf"\1{_GONE}",
    ),
    Rule(
        "either of them in a pair",
        rf"(\(\s*+b?[\\]*+[\"'](?:{_HEADER}|[\w.-]*?(?:{_SECRET}|{_MAYBE_SECRET}))[\\]*+[\"']\s*+,\s*+{_OPENING}){_IS_NO_VALUE}(?:{_QUOTED})",
        rf"\1{_GONE}",
    ),
    Rule(
        "either of them on a command line",
        rf"((?<![\w-])(?=--[\w-]++\s++[^\s-])--[\w-]*?(?:{_SECRET}|{_MAYBE_SECRET})\s++{_OPENING})(?!(?:and|for|in|or|to|{_WORDS})\b){_VALUE}",
        rf"\1{_GONE}",
    ),
    Rule(
        "a parameter of a signed URL",
        r"((?:[?&;](?:sig|token)|signature|credential)=)(?!\*\*\*)[^&\s\"'<>,\\]++",
        rf"\1{_GONE}",
    ),
    Rule(
        "user and password in a database's URL, whose path holds no @: so a password may hold / and @",
        rf"((?:{_DATABASES})(?:\+\w{{1,30}})?://)[^/\s:@\"'<>]{{0,200}}+:(?:[^\s@\"'<>]{{0,1000}}+@){{1,10}}+",
        r"\1",
    ),
    Rule(
        "user and password as Go's drivers take them: user:password@tcp(host)",
        r"(?<![^\s\"'`=(,<\[{])[^\s:@\"'`=/(,<\[{]{1,80}+:[^\s\"'`]{0,200}?@(?=(?:tcp|udp|unix)[46]?\()",
        "",
    ),
    Rule("user and password in a URL", r"(://)[^/\s:@\"'<>]*+:[^/\s\"'<>]*@", r"\1"),
    Rule(
        "a user in a URL, where that is no container of Azure's",
        r"(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)(://)[^/\s:@\"'<>]++@",
        r"\1",
    ),
    Rule("user and password for Oracle", r"(jdbc:oracle:\w{1,20}:)[^/\s@\"']{1,200}/[^\s@\"']{1,200}@", r"\1"),
)

_variables = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
_values = set[str]()


def remember_variable(name: str) -> None:
    """Let `redacted` remove the value of this environment variable, whatever it is at the time. Nothing but the name is
    kept."""
    _variables.add(name)


def remember_value(value: str) -> None:
    """Let `redacted` remove this value: a secret that stands in a configuration itself."""
    _values.add(value)


def redacted(text: str) -> str:
    """Return the text without credentials, tokens, signatures, what was signed, and request headers; with status, code,
    paths and the rest."""
    for value in _secrets():
        text = text.replace(value, _GONE)
    for rule in RULES:
        text = rule.applied(text)
    return text


def error_status(text: str) -> str | None:
    """Return the HTTP status of which an error of obstore or delta-rs speaks."""
    status = _STATUS.search(text)
    return status[1] if status else None


def error_code(text: str) -> str | None:
    """Return the code in a server's XML answer."""
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
    """Return the same function, `scrubbing` around it."""

    @wraps(call)
    def scrubbed_call(*args: Params.args, **options: Params.kwargs) -> Result:
        with scrubbing():
            return call(*args, **options)

    return scrubbed_call


def _secrets() -> list[str]:
    """Return the values that must not be shown, the longest first; also as URLs have them."""
    values = {os.environ.get(name, "") for name in _variables} | _values
    values |= {quote(value, safe="") for value in values}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)
