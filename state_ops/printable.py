"""Texts from elsewhere as a terminal or a plain log line may show them: without a character that does something.

A value of a row, the name of a file or the message of a server may have escape sequences, which move the cursor, fill
the clipboard or hide what stands before, and signs that turn the direction of what follows. Each such character is
shown by its number: `\\x1b[2J`, `\\u202e`.
"""

from __future__ import annotations

import re

# C0 without tab and line feed, DEL and C1; what turns the direction of a text; line ends that only some programs know;
# marks without a width; tags; halves of characters, which no encoding has.
_ACTS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f\ud800-\udfff]"
)
_LINE_ENDS = re.compile(r"[\t\n]")
_FORGED = re.compile(r"\n(?=\s*(?:where|next|error):)")


def printable(text: str) -> str:
    """Return a text whose characters only show; its lines stay.

    Example:
        >>> from state_ops.printable import printable
        >>> printable("a\\x1b[2Jb")
        'a\\\\x1b[2Jb'
    """
    return text if text.isascii() and text.isprintable() else _ACTS.sub(_shown, text)


def on_one_line(text: str) -> str:
    r"""Return such a text on one line: its line ends and tabs are shown as `\n` and `\t`."""
    return _LINE_ENDS.sub(lambda found: {"\n": "\\n", "\t": "\\t"}[found[0]], printable(text))


def unforged(text: str) -> str:
    r"""Return such a text of which no line begins as those that stand below an error."""
    return _FORGED.sub("\\\\n", printable(text))


def in_json(text: str) -> str:
    r"""Return a document of JSON whose texts have each such character as JSON escapes it: `\u009b`. It means the same.

    Example:
        >>> from state_ops.printable import in_json
        >>> in_json('"a\x9b"')
        '"a\\u009b"'
    """
    return text if text.isascii() and text.isprintable() else _ACTS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
