"""Diagrams of the pages, which are fences of Mermaid there: drawn once, kept as pictures, so that the site needs no
script of anybody's.

    python docs/site/diagrams.py     draws those that pages have and removes others; needs npm, Chromium and the network

A build that lacks a picture says so, and fails.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

MERMAID = "mermaid@11.12.1"
ROOT = Path(__file__).parents[2]
PICTURES = Path(__file__).parent / "static" / "diagrams"


def name_of(diagram: str, theme: str) -> str:
    return f"{hashlib.sha256(diagram.strip().encode()).hexdigest()[:12]}-{theme}.svg"


class Diagram(Directive):
    has_content = True

    def run(self) -> list[nodes.Node]:
        environment, text = self.state.document.settings.env, "\n".join(self.content)
        up = "../" * environment.docname.count("/")
        images = []
        for theme in ("light", "dark"):
            name = name_of(text, theme)
            if not (PICTURES / name).exists():
                raise self.warning(f"The diagram is not drawn: `python docs/site/diagrams.py` makes {name}")
            drawn = re.search(r'width="(\d+)"', (PICTURES / name).read_text())
            assert drawn is not None, name
            least = int(drawn[1]) * 2 // 3  # letters can still be read; in a narrower column it scrolls
            images.append(
                f'<img class="only-{theme}" src="{up}_static/diagrams/{name}" alt="Diagram"'
                f' style="max-width: max(100%, {least}px)">'
            )
        return [nodes.raw("", f'<div class="diagram">{"".join(images)}</div>', format="html")]


def setup(app) -> dict[str, bool]:
    app.add_directive("mermaid", Diagram)
    return {"parallel_read_safe": True}


def of_pages() -> dict[str, tuple[str, str]]:
    """By the name of its picture, each diagram and theme."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    diagrams = [text for page in pages for text in re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.M | re.S)]
    return {name_of(text, theme): (text, theme) for text in diagrams for theme in ("light", "dark")}


def _sized(drawing: str) -> str:
    """Letters as large as those of the page: a drawing that is wider than it scrolls."""
    width = re.search(r'viewBox="\S+ \S+ ([\d.]+) ', drawing)
    assert width is not None
    return drawing.replace('width="100%"', f'width="{float(width[1]) * 0.7:.0f}"', 1)


def draw() -> None:
    from playwright.sync_api import sync_playwright

    wanted = of_pages()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES.glob("*.svg"):
        if picture.name not in wanted:
            picture.unlink()
    missing = {name: what for name, what in wanted.items() if not (PICTURES / name).exists()}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "-xzf", next(Path(folder).glob("*.tgz"))], cwd=folder, check=True)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium")
        for name, (text, theme) in missing.items():
            page = browser.new_page()
            page.add_script_tag(path=f"{folder}/package/dist/mermaid.min.js")
            options = {
                "theme": "dark" if theme == "dark" else "neutral",
                "htmlLabels": False,
                "flowchart": {"htmlLabels": False},
                "fontFamily": "sans-serif",
            }
            page.evaluate(f"mermaid.initialize({json.dumps(options)})")
            drawn = page.evaluate("text => mermaid.render('diagram', text).then(drawn => drawn.svg)", text)
            (PICTURES / name).write_text(_sized(drawn))
            page.close()
        browser.close()


if __name__ == "__main__":
    draw()
