"""Texts from elsewhere within Markdown that we write, for pages of others: Dagster's, GitHub's."""

from __future__ import annotations

import re

from state_ops.printable import on_one_line
from state_ops.redaction import redacted

_SPECIAL = re.compile(r"([\\`*_\[\]#~!|])")
_LINKED = re.compile(r":(?=//)|\bwww(?=\.)|@(?=\w)", re.IGNORECASE)  # links that stand there without markup


def as_text(text: str) -> str:
    r"""Return a text of which nothing becomes markup, a link or an image, also in a cell of a table.

    Example:
        >>> from weir.markdown import as_text
        >>> as_text("![x](y) <b> a|b")
        '\\!\\[x\\](y) &lt;b&gt; a\\|b'
    """
    text = on_one_line(redacted(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _LINKED.sub("\\g<0>\u200b", _SPECIAL.sub(r"\\\1", text))


def as_code(text: str) -> str:
    """Return a block of code, whatever fences the text has itself."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
