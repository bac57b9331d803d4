"""`make release`: build the sdist and the wheel, check what is in them, and run the tutorial's pipeline on the wheel.

    tracked files -> uv build -> contents are those of git -> a bare environment: weir --version, weir run

Nothing is published. `.github/workflows/release.yml` does that, with the files that this leaves in `.weir/release`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from infra import addresses
from state_ops.extras import version

PROJECT = Path(__file__).resolve().parents[1]
BUILT = PROJECT / ".weir" / "release"
PACKAGES = ("weir", "state_ops")
BESIDE = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
"""What the sdist has beside the packages."""
MADE = {"PKG-INFO", "setup.cfg", "weir_state.egg-info"}
"""What setuptools adds to the sdist."""
UV = Path(sys.executable).with_name("uv")
ORDERS = {
    "2026-03-02.csv": "ada,tea,4.50,2026-03-02T09:05:00Z\nbob,tea,9.00,2026-03-02T09:40:00Z\n",
    "2026-03-03.csv": "bob,cup,24.00,2026-03-03T09:15:00Z\nada,tea,9.00,2026-03-03T16:00:00Z\n",
}
DAYS_SINCE_PREVIOUS = """
import polars as pl
rows = pl.read_delta(".weir/storage/orders/tables/orders").sort("ordered")
print(rows.select("customer", "days_since_previous").rows())
"""
EXPECTED = [("ada", None), ("bob", None), ("bob", 1.0), ("ada", 1.2)]


def main(tag: str | None = None) -> None:
    """Build, check and try a release.

    Args:
        tag: The name under which it is to be published; None: it is not.
    """
    if tag is not None:
        check_tag(tag)
    sdist, wheel = build(BUILT)
    tracked = frozenset(git_files())
    stray, lacking = differences(in_wheel(wheel), expected_in_wheel(tracked))
    refuse(wheel, stray, lacking)
    stray, lacking = differences(in_sdist(sdist), expected_in_wheel(tracked) | BESIDE)
    refuse(sdist, stray, lacking)
    with tempfile.TemporaryDirectory(prefix="weir-release-") as folder:
        try_out(wheel, Path(folder))
    print(f"{sdist}\n{wheel}")


def check_tag(tag: str) -> None:
    """Refuse a tag that is not that of this version, and a release without addresses."""
    if tag != f"v{version()}":
        raise SystemExit(
            f"The tag is {tag}, and pyproject.toml says {version()}: tag v{version()}, or change the version."
        )
    if not addresses.given():
        raise SystemExit("pyproject.toml has no [project.urls]: fill them in, then run `python -m infra.addresses`.")


def git_files() -> list[str]:
    """Return the paths of all files that git tracks and that are there, as they would be committed now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, check=True).stdout.decode()
    return [name for name in listed.split("\0") if name and (PROJECT / name).is_file()]


def build(folder: Path) -> tuple[Path, Path]:
    """Build from a copy of the tracked files, so that nothing else that lies in the checkout can get in.

    Returns:
        The sdist, and the wheel that is built from it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="weir-build-") as copy:
        for name in git_files():
            target = Path(copy, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PROJECT / name, target)
        readme = Path(copy, "README.md")
        readme.write_text(addresses.absolute(readme.read_text("utf-8"), f"v{version()}"), "utf-8")
        # Setuptools is the locked one of this environment: nothing is downloaded.
        run(
            [UV, "build", "--quiet", "--offline", "--no-build-isolation", "--python", sys.executable, "-o", folder],
            copy,
        )
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/" not in name}


def in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as packed:
        names = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    return {name for name in names if name.split("/")[0] not in MADE}


def expected_in_wheel(tracked: Iterable[str]) -> set[str]:
    return {name for name in tracked if name.split("/")[0] in PACKAGES}


def differences(packed: set[str], expected: set[str]) -> tuple[list[str], list[str]]:
    """Return what is packed and should not be, and what should be packed and is not."""
    return sorted(packed - expected), sorted(expected - packed)


def refuse(file: Path, stray: list[str], lacking: list[str]) -> None:
    if stray or lacking:
        raise SystemExit(
            f"{file.name} is not what it should be.\n  stray:   {', '.join(stray) or '-'}\n"
            f"  lacking: {', '.join(lacking) or '-'}\n"
            "  next:    see [tool.setuptools] in pyproject.toml, and MANIFEST.in."
        )


def try_out(wheel: Path, folder: Path) -> None:
    """Install the wheel into an environment of its own with an empty home, and run the tutorial's pipeline there."""
    home, project = folder / "home", folder / "shop"
    home.mkdir()
    bare = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    jars = PROJECT / ".weir" / "cache"
    if jars.is_dir():  # else Delta's are downloaded, 10 MB
        bare["WEIR_LOCAL__CACHE_DIR"] = str(jars)
    environment = folder / "environment"
    run([UV, "venv", "--quiet", "--python", sys.executable, environment], folder)
    install = [UV, "pip", "install", "--quiet", "--python", environment, "-c", PROJECT / "requirements.lock"]
    run([*install, f"weir-state[gates,java] @ {wheel.as_uri()}"], folder)
    weir = environment / "bin" / "weir"
    said = run([weir, "--version"], folder, bare)
    if said != f"weir {version()}\n":
        raise SystemExit(f"`weir --version` says {said!r} in a bare environment, and pyproject.toml {version()}.")
    write_tutorial(project)
    print(run([weir, "run", "orders", "--until-caught-up"], project, bare), end="")
    rows = run([environment / "bin" / "python", "-c", DAYS_SINCE_PREVIOUS], project, bare)
    if rows.strip() != repr(EXPECTED):
        raise SystemExit(f"The tutorial's pipeline has made other rows.\n  made:     {rows}  expected: {EXPECTED!r}")


def write_tutorial(project: Path) -> None:
    """Make a project of the tutorial's pipeline and settings, with rows for it."""
    page = (PROJECT / "docs" / "tutorial.md").read_text("utf-8")
    boxes = dict(
        re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[::-1]
    )  # the first of a name
    files = {name: boxes[name] for name in ("shop/orders.py", "configs/dev.yaml")}
    files["pyproject.toml"] = '[project]\nname = "shop"\n\n[tool.weir]\npackage = "shop"\n'
    files |= {
        f".weir/landing/orders/{name}": f"customer,product,amount,ordered\n{rows}" for name, rows in ORDERS.items()
    }
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, "utf-8")


def run(command: list[object], folder: Path | str, environment: dict[str, str] | None = None) -> str:
    """Run a program, and return what it prints; end with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Build a release, check it, and try it in a bare environment.")
    arguments.add_argument("--tag", help="Refuse the release if it cannot be published under this tag.")
    main(arguments.parse_args().tag)
