"""A playbook page as the steps that its test takes, and how its words are compared with what really came.

```bash           is run by bash, and has to end with 0, or as `<!-- exit: 1 -->` before it says
```text           is what the command, or the action, before it shows: line by line in this order, other lines may come between;
                  `…` stands for anything
```yaml           after `<!-- test: configure -->` is merged into the site's configuration
```python, yaml   that begins with `# path/to/file` becomes that file of the project
<!-- test: WORDS -->   what happens to the site meanwhile; nobody who reads the page sees it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weir.settings.configuration import PROJECT

FOLDER = PROJECT / "docs" / "playbooks"
INDEX = FOLDER / "README.md"
HEADINGS = ("Symptom", "Look at", "Do", "It is over when", "Why this works")
ANY = "…"

_STEP = re.compile(r"^<!-- (test|exit): (.*?) -->$|^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\b.*\n")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a page has done or says. kind: "act", "bash", "text", "yaml", "file"; code: how a bash step has to
    end; line: in the page."""

    kind: str
    text: str
    line: int
    code: int = 0


def pages() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.md") if path != INDEX)


def steps(page: Path) -> list[Step]:
    """In their order. ValueError for a fence of another kind, or an exit code without a command."""
    text, steps, code = page.read_text(), list[Step](), 0
    for match in _STEP.finditer(text):
        word, text_of, kind, body = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if word == "exit":
            code = int(text_of)
            continue
        if word == "test":
            steps.append(Step("act", text_of, line))
        elif kind in ("python", "yaml") and _FILE.match(body):
            steps.append(Step("file", body, line))
        elif kind in ("bash", "text", "yaml"):
            steps.append(Step(kind, body, line, code))
        else:
            raise ValueError(
                f"{page.name}:{line}: a fence of kind {kind!r}; there are bash, text, yaml, and python for a file"
            )
        if code and kind != "bash":
            raise ValueError(f"{page.name}:{line}: an exit code has to stand before a command")
        code = 0
    return steps


def file_of(text: str) -> str:
    """The path in the first line of a step that becomes a file."""
    match = _FILE.match(text)
    assert match is not None
    return match[1]


def missing(expected: str, shown: str) -> str | None:
    """The first line of a page's text that what was shown does not have in its place; None if all are there."""
    lines = [_plain(line) for line in shown.splitlines()]
    at = 0
    for wanted in filter(None, map(_plain, expected.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, wanted.split(ANY))))
        place = next((number for number in range(at, len(lines)) if pattern.fullmatch(lines[number])), None)
        if place is None:
            return wanted
        at = place + 1
    return None


def _plain(line: str) -> str:
    return " ".join(line.split())
