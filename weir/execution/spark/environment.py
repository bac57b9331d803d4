"""The environment of the JVM that this process starts: which of this process's variables may reach it.

A local Spark is Weir's own: variables meant for another Spark on this machine do not reach it. A Spark on a cluster is
configured by the person who runs it. There the variables do reach it, except those that cannot work, which are refused
by name.
"""

from __future__ import annotations

import ctypes
import locale
import os
import pwd
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from state_ops.errors import ConfigurationError
from state_ops.logs import Logger
from weir.execution.spark.imports import load_pyspark

log = Logger("weir.spark")

_SUBMIT = "PYSPARK_SUBMIT_ARGS"
_OF_ANOTHER_SPARK = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", _SUBMIT, "SPARK_LOCAL_HOSTNAME")
_OF_CONNECT = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
_UTF8 = ("C.UTF-8", "C.utf8", "en_US.UTF-8")
_CTYPE_MASK = 1  # of glibc and musl


def check(master: str) -> None:
    """Refuse what Spark cannot start with, or would misunderstand, before it starts.

    Raises:
        ConfigurationError: The message names the variable, the user or the address.
    """
    for name in _OF_CONNECT:
        if name in os.environ:
            raise ConfigurationError(
                f"The variable {name} makes PySpark a client of Spark Connect, and spark.master is {master}.",
                where=f"{name}={os.environ[name]}",
                next=f"Unset {name}, or set spark.master to sc://HOST:PORT.",
            )
    submitted = os.environ.get(_SUBMIT)
    if submitted is not None and not master.startswith("local") and "pyspark-shell" not in submitted.split():
        raise ConfigurationError(
            f"The variable {_SUBMIT} does not end with pyspark-shell, without which PySpark starts nothing.",
            where=f"{_SUBMIT}={submitted}",
            next=f"Unset {_SUBMIT} and write the options into spark.conf, or append pyspark-shell.",
        )
    try:
        with socket.socket(socket.AF_INET) as tried:
            tried.bind(("127.0.0.1", 0))
    except OSError as error:
        raise ConfigurationError(
            "This machine has no address 127.0.0.1, by which PySpark talks to its JVM.",
            where=str(error),
            next="Give the loopback interface its IPv4 address: ip link set lo up; ip addr add 127.0.0.1/8 dev lo.",
        ) from error
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        user = os.geteuid()
        raise ConfigurationError(
            f"The user with the number {user} has no name on this machine, and Spark does not start without one.",
            where="/etc/passwd",
            next=f"Add the line weir:x:{user}:{os.getegid()}::/tmp:/bin/sh there, or run as a user who has an entry.",
        ) from None


def variables(master: str) -> dict[str, str | None]:
    """Return the variables that the JVM gets in place of this process's own; None: it does not get the variable."""
    replaced: dict[str, str | None] = {**_spark_home(), **_utf8_locale()}
    if master.startswith("local"):
        ignored = [name for name in _OF_ANOTHER_SPARK if os.environ.get(name)]
        if ignored:
            log.warning("a local Spark does not follow these variables; spark.conf configures it", variables=ignored)
        replaced |= dict.fromkeys(_OF_ANOTHER_SPARK)
        # Spark puts this directory on its class path, and a JVM takes no archive of classes with a directory that has
        # files there: so one that does not exist, as PySpark's own.
        replaced["SPARK_CONF_DIR"] = str(Path(__file__).parent / "conf")
        replaced["SPARK_LOCAL_IP"] = "127.0.0.1"  # else Spark asks for the address of this host's name
    return replaced


@contextmanager
def environment(replaced: Mapping[str, str | None]) -> Iterator[None]:
    """Let a child that starts meanwhile inherit these variables: nobody but its own user can read them there."""
    kept = {name: os.environ.get(name) for name in replaced}
    _set(replaced)
    try:
        yield
    finally:
        _set(kept)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _spark_home() -> dict[str, str]:
    """Return PySpark's own Spark in place of one of another version, whose JVM would not understand this PySpark."""
    load_pyspark()
    import pyspark

    own, other = Path(str(pyspark.__file__)).parent, os.environ.get("SPARK_HOME")
    if not other or not (own / "jars").is_dir():
        return {}
    jar = next(Path(other, "jars").glob("spark-core_*.jar"), None)
    version = re.sub(r"spark-core_[\d.]+-", "", jar.stem) if jar is not None else None
    if version == pyspark.__version__:
        return {}
    log.warning(
        "SPARK_HOME is not followed: its Spark is not PySpark's",
        SPARK_HOME=other,
        version=version or "none",
        pyspark=pyspark.__version__,
    )
    return {"SPARK_HOME": str(own)}


def _utf8_locale() -> dict[str, str]:
    """Return a locale in which Java finds files whose names have letters beyond ASCII, as Python does in any locale."""
    is_utf8 = locale.getencoding().replace("-", "").lower() == "utf8"
    if is_utf8 or sys.platform != "linux" or sys.getfilesystemencoding() != "utf-8":
        return {}
    of_c = ctypes.CDLL(None)
    of_c.newlocale.restype = ctypes.c_void_p
    of_c.newlocale.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    of_c.freelocale.argtypes = (ctypes.c_void_p,)
    for name in _UTF8:
        made = of_c.newlocale(_CTYPE_MASK, name.encode(), None)
        if made:
            of_c.freelocale(made)
            return {"LC_ALL": name}
    log.warning(
        "no locale of UTF-8 is installed, so Spark finds no file whose name has letters beyond ASCII", LC_ALL=None
    )
    return {}
