"""How `make docs` builds the site: the pages as they lie in the repository, and the API's docstrings.

What a Git host shows of a page is what the site shows. So pages have no directives: navigation is added to their text
when they are read, and diagrams are drawn beforehand (`diagrams.py`).
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

project = "Weir"
copyright = "the authors of Weir"
html_title = "Weir"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "benchmarks/results/*.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "diagrams"]

myst_heading_anchors = 4  # what links to headings are checked against
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["myst.header"]  # pages may skip a level

highlight_language = "text"
default_role = "literal"  # docstrings quote code as Markdown does
napoleon_use_ivar = True  # else attributes would be described twice
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

_TREE = "\n```{{toctree}}\n:hidden:\n:glob:\n{}\n{}\n```\n"
_NAVIGATION = {
    "README": {
        "Start": "docs/README docs/tutorial docs/concepts docs/cost docs/limits docs/threat-model docs/coming-from/*",
        "Recipes": "docs/recipes/README docs/recipes/[a-z]*",
        "How-to": "docs/how-to/*",
        "Reference": "docs/reference/* docs/site/api/*",
        "Something is wrong": "docs/playbooks/README",
        "How it is made": "docs/architecture docs/adr/README benchmarks/README CONTRIBUTING SECURITY CHANGELOG",
    },
    "docs/reference/operators": {"": "operators/*"},
    "docs/playbooks/README": {"": "[!R]*"},
    "docs/adr/README": {"": "0*"},
    "benchmarks/README": {"": "results/*"},
}


def _complete(_: Sphinx, docname: str, source: list[str]) -> None:
    """Add what the site needs to a page that was read: its part of the navigation. A link to a folder becomes text."""
    folder = (ROOT / docname).parent

    def linked(match: re.Match[str]) -> str:
        return match[1] if (folder / match[2]).is_dir() else match[0]

    text = re.sub(r"\[([^\[\]]+)\]\(([\w./-]+)\)", linked, source[0])
    trees = (
        _TREE.format(f":caption: {caption}\n" if caption else "", pages.replace(" ", "\n"))
        for caption, pages in _NAVIGATION.get(docname, {}).items()
    )
    source[0] = text + "".join(trees)


def _link(_app: Sphinx, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """A page that a docstring names is linked, and has to be there."""
    lines[:] = [re.sub(r"`?\bdocs/([\w/-]+)\.md\b`?", r":doc:`/docs/\1`", line) for line in lines]


def _begin_at_the_readme(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _complete)
    app.connect("autodoc-process-docstring", _link)
    app.connect("build-finished", _begin_at_the_readme)
