"""The jars that Spark needs beside its own, and those of a Kafka broker for tests, fetched once and checked against
`weir/execution/spark/jars.lock`.

    <cache_dir>/jars/
        delta-spark_4.2_2.13-4.4.0.jar     whole and of the locked digest, or not there at all
        .lock                              held by the one process that fetches
        .fetch-<random>/                   Ivy's working directory: its cache and what it downloaded

Why this is safe: a jar is given its name only after its digest was compared, by a rename inside one file system; the
digest is compared again at every call, so a jar altered later is fetched anew; whatever a killed fetch leaves lies in
a `.fetch-` directory, which the next one to succeed removes.

Ivy comes with PySpark and knows where the public jars are; nothing here names a host.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import ssl
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import quoteattr

from filelock import FileLock

from state_ops.counts import counted
from state_ops.errors import ConfigurationError, DamageError, TransientError
from state_ops.logs import Logger
from weir.execution.spark.java import java_home

log = Logger("weir.spark")

_FETCH_TIMEOUT_S = 600
_TRUST_PASSWORD = "changeit"  # guards nothing: the store holds public certificates; Java wants one to check its digest


@dataclass(frozen=True, slots=True)
class LockedJar:
    """One line of `weir/execution/spark/jars.lock`: `organisation:module revision sha256`.

    Attributes:
        purpose: The `[section]` that it stands in.
    """

    purpose: str
    organisation: str
    module: str
    revision: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.module}-{self.revision}.jar"


def delta_jars(cache_dir: Path) -> list[Path]:
    """Return the jars that let Spark read and write Delta tables, for `spark.jars`.

    The first call downloads about 10 MB into `<cache_dir>/jars`; later ones only compare digests (milliseconds).

    Raises:
        TransientError: The jars cannot be downloaded.
        DamageError: What was downloaded is not what the lock says.
        ConfigurationError: There is no Java or no PySpark to download with, or they are not for the PySpark that is
            installed.
    """
    jars = locked_jars("delta")
    _check_spark(jars[0])
    return fetch(jars, cache_dir)


def _check_spark(delta: LockedJar) -> None:
    """Refuse a PySpark of another minor version than Delta's jar is built for, which its name says."""
    spark, installed = delta.module.split("_")[1], metadata.version("pyspark")
    if installed.split(".")[:2] != spark.split("."):
        raise ConfigurationError(
            f"PySpark {installed} is installed, and Delta's jars are for Spark {spark}.",
            where=f"weir/execution/spark/jars.lock, {delta.file_name}",
            next=f"pip install 'pyspark=={spark}.*'",
        )


def s3_jars(cache_dir: Path) -> list[Path]:
    """Return the jars that let Spark read s3:// and s3a://; 13 MB, otherwise as `delta_jars`."""
    return fetch(locked_jars("s3"), cache_dir)


def locked_jars(purpose: str) -> list[LockedJar]:
    """Return the jars that `weir/execution/spark/jars.lock` names for a purpose, in its order."""
    lock = resources.files(__package__) / "jars.lock"
    section, jars = "", []
    for line in lock.read_text("utf-8").splitlines():
        match line.split("#")[0].split():
            case [heading]:
                section = heading.strip("[]")
            case [name, revision, sha256] if section == purpose:
                organisation, module = name.split(":")
                jars.append(LockedJar(section, organisation, module, revision, sha256))
    return jars


def fetch(jars: Sequence[LockedJar], cache_dir: Path) -> list[Path]:
    """Return the paths of `jars` under `cache_dir`, in their order, downloading those not there yet; errors as
    `delta_jars`."""
    directory = cache_dir.absolute() / "jars"
    paths = [directory / jar.file_name for jar in jars]
    if _missing(jars, directory):
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock"):  # the kernel lets go of it when this process dies
            if missing := _missing(jars, directory):
                log.info(f"downloading {counted(len(missing), 'jar')}, once", to=str(directory))
                _download(missing, directory, java_home(cache_dir) / "bin" / "java")
    return paths


def _missing(jars: Sequence[LockedJar], directory: Path) -> list[LockedJar]:
    return [jar for jar in jars if _sha256(directory / jar.file_name) != jar.sha256]


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _download(jars: Sequence[LockedJar], directory: Path, java: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory, ignore_cleanup_errors=True) as work:
        fetched = _run_ivy(jars, Path(work), java)
        for jar in jars:
            digest = _sha256(fetched / jar.file_name)
            if digest != jar.sha256:
                raise DamageError(
                    f"The downloaded {jar.file_name} is not the file that weir/execution/spark/jars.lock names.",
                    where=f"sha256 {digest}, locked {jar.sha256}",
                    next="try again; if it stays so, something between here and the public jars alters them",
                )
        for jar in jars:
            (fetched / jar.file_name).replace(directory / jar.file_name)
    # At the end, not at the start: the Java of a killed fetch may live on a little and write again.
    for leftover in directory.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _run_ivy(jars: Sequence[LockedJar], work: Path, java: Path) -> Path:
    """Let Ivy download into `work`; the directory with the jars. Twice, where Java does not trust what Python
    trusts."""
    dependencies = "".join(
        f"<dependency org={quoteattr(jar.organisation)} name={quoteattr(jar.module)} rev={quoteattr(jar.revision)}"
        ' transitive="false" conf="default->master"/>'
        for jar in jars
    )
    (work / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="weir" module="jars"/><configurations><conf'
        f' name="default"/></configurations><dependencies>{dependencies}</dependencies></ivy-module>',
        "utf-8",
    )
    # Relative to the working directory: Ivy would read brackets in an absolute path as its own pattern.
    options = ["-ivy", "ivy.xml", "-cache", "ivy", "-retrieve", "jars/[artifact]-[revision].[ext]", "-warn"]
    command: list[str | Path] = [
        java,
        f"-Divy.default.ivy.user.dir={work}",
        "-cp",
        _ivy_jar(),
        "org.apache.ivy.Main",
        *options,
    ]
    run = _run(command, work)
    if run.returncode != 0 and "PKIX path building failed" in run.stdout:
        # A packaged Java brings certificates of its own and knows nothing of those that a company's network adds to
        # the system; Python does.
        store = work / "trusted.jks"
        store.write_bytes(_java_trust_store(ssl.create_default_context().get_ca_certs(binary_form=True)))
        trust = [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={_TRUST_PASSWORD}"]
        run = _run([java, *trust, *command[1:]], work)
    if run.returncode != 0:
        reason = re.search(r"Server access error.*", run.stdout) or re.search(r"module not found.*", run.stdout)
        raise TransientError(
            f"The jars for {jars[0].purpose} could not be downloaded: {', '.join(jar.file_name for jar in jars)}.",
            where=reason[0] if reason else run.stdout.strip()[-500:] or f"{java} ended with {run.returncode}",
            next=(
                "connect this machine to the internet once and run it again (behind a proxy: JAVA_TOOL_OPTIONS="
                "'-Dhttps.proxyHost=... -Dhttps.proxyPort=...'), or copy the jars from another machine's cache into "
                f"{work.parent}"
            ),
        )
    return work / "jars"


def _run(command: Sequence[str | Path], work: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_FETCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, returncode=1, stdout=f"no answer within {late.timeout:.0f} s")


def _ivy_jar() -> Path:
    pyspark = find_spec("pyspark")  # found, not imported: that takes a second
    jars = sorted(Path(pyspark.origin).parent.glob("jars/ivy-*.jar")) if pyspark and pyspark.origin else []
    if not jars:
        raise ConfigurationError(
            "PySpark's jars are not installed, and Ivy, which downloads the others, is one of them.",
            where="pyspark/jars/ivy-*.jar among the installed packages",
            next="make venv",
        )
    return jars[-1]


def _java_trust_store(certificates: Sequence[bytes]) -> bytes:
    """DER certificates as a Java key store (JKS, version 2), the oldest format and the one that every Java reads."""
    store = struct.pack(">III", 0xFEEDFEED, 2, len(certificates))
    for number, certificate in enumerate(certificates):
        alias = b"%d" % number
        store += struct.pack(">IH", 2, len(alias)) + alias + struct.pack(">QH", 0, 5) + b"X.509"
        store += struct.pack(">I", len(certificate)) + certificate
    return store + hashlib.sha1(_TRUST_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + store).digest()
