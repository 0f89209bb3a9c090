"""Text that is shown to people: escapes for terminals, and passwords in URLs."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(:/{1,2}[^/\s:@]*:)[^/\s]+@")
"""The password in ``ftp://user:password@host``."""


def has_password(url: str) -> bool:
    """Whether a URL contains a password."""
    return _PASSWORD.search(url) is not None


def terminal_text(text: object, *, one_line: bool = False) -> str:
    """Text that is safe to show: unprintable characters, which terminals obey (escapes, C1, bidi controls, surrogates), become Python escapes.

    Passwords in URLs become ``***``.

    Args:
        text: any object, which is converted by ``str``.
        one_line: escape line ends, too, for a name in a table or a progress bar.
    """
    line_end = "" if one_line else "\n"
    text = str(text)
    if "@" in text:
        text = _PASSWORD.sub(r"\1***@", text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == line_end else c.encode("unicode_escape").decode() for c in text)
