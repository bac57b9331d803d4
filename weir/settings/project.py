"""Finds the project's folder: the one with `configs/`, pipelines and `.weir/`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]
_SAYS_SO = re.compile(r"^\[tool\.weir\]", re.MULTILINE)


def project() -> Path:
    """Return the nearest folder, from the working directory upwards, whose pyproject.toml has `[tool.weir]`.

    Where there is none it is the folder in which Weir lies, so that processes that start elsewhere mean the same files.
    """
    try:
        here = Path.cwd().resolve()
    except FileNotFoundError:  # somebody has removed it
        return _HERE
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and _SAYS_SO.search(file.read_text("utf-8", "replace")):
            return folder
    return _HERE


def settings_folder(project: Path) -> Path:
    """Return the folder with the settings' files: `configs/`, or what `[tool.weir]` says as `configs`."""
    file = project / "pyproject.toml"
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    if "configs" not in text or not _SAYS_SO.search(text):  # most projects, without the time to parse it
        return project / "configs"
    return project / str(tomllib.loads(text)["tool"]["weir"].get("configs", "configs"))


def is_installed(folder: Path) -> bool:
    """Return whether packages are installed into a folder, so that it is nobody's project."""
    return folder.name in ("site-packages", "dist-packages")
