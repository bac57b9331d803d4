"""`python -m infra.addresses`: write the addresses of `[project.urls]` in pyproject.toml into the pages that show them.

The repository's owner fills in `[project.urls]`, and nothing else. README.md shows badges and where to report a bug,
SECURITY.md shows where to report a vulnerability.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
NAMES = ("Repository", "Issues", "Security")
_MARKED = re.compile(r"(<!-- addresses -->\n).*?(\n?<!-- /addresses -->)", re.DOTALL)
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def given() -> dict[str, str]:
    """Return the addresses of pyproject.toml by name; empty if the owner has not filled them in."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    urls: dict[str, str] = project.get("urls", {})
    if urls and urls.keys() != set(NAMES):
        raise SystemExit(f"[project.urls] of pyproject.toml has {', '.join(urls)}: it needs {', '.join(NAMES)}.")
    return urls


def of_readme(urls: Mapping[str, str]) -> str:
    """Return the line of badges of README.md."""
    if not urls:
        return ""
    pypi = "https://pypi.org/project/weir-state/"
    badges = (
        ("release", "https://img.shields.io/pypi/v/weir-state", pypi),
        ("Python", "https://img.shields.io/pypi/pyversions/weir-state", pypi),
        ("license", "https://img.shields.io/pypi/l/weir-state", f"{urls['Repository']}/blob/main/LICENSE"),
        ("bugs", "https://img.shields.io/badge/bugs-report-red", urls["Issues"]),
    )
    return "\n".join(f"[![{name}]({picture})]({page})" for name, picture, page in badges)


def of_security(urls: Mapping[str, str]) -> str:
    """Return the sentence of SECURITY.md about where to report."""
    if not urls:
        return (
            "The owner of this repository has not named an address yet. It belongs in `[project.urls]` of\n"
            "`pyproject.toml`, from which `python -m infra.addresses` writes it here."
        )
    return f"Report it in private and not in a public issue: <{urls['Security']}>."


PAGES = {"README.md": of_readme, "SECURITY.md": of_security}


def marked(text: str, addresses: str) -> str:
    """Return a page with the addresses between its two marks."""
    new, found = _MARKED.subn(lambda match: f"{match[1]}{addresses}\n{match[2].lstrip()}", text)
    assert found == 1, "a page has one place for addresses"
    return new


def absolute(readme: str, ref: str) -> str:
    """Return README.md with links that work outside the repository, as on a package index.

    Args:
        ref: The tag or branch that they lead to.
    """
    urls = given()
    if not urls:
        return readme

    def outside(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        return f"{picture}{text}({urls['Repository']}/{'raw' if picture else 'blob'}/{ref}/{path})"

    return _LINK.sub(outside, readme)


def main() -> None:
    """Write the pages anew."""
    urls = given()
    for name, written in PAGES.items():
        page = PROJECT / name
        page.write_text(marked(page.read_text("utf-8"), written(urls)), "utf-8")


if __name__ == "__main__":
    main()
