"""Paths that begin with ``~``, which only a shell replaces by itself."""

from __future__ import annotations

import os


def expanded(path: str | os.PathLike[str]) -> str:
    """Return ``path`` with the home directory in the place of a leading ``~`` or ``~user``; URLs stay as they are.

    Raises:
        ValueError: there is no such user.
    """
    text = os.fspath(path)
    if not text.startswith("~"):
        return text
    whole = os.path.expanduser(text)
    if whole.startswith("~"):
        raise ValueError(
            f"{text}: {text.partition('/')[0]} is no user's home directory; write ./{text} for a folder of this name"
        )
    return whole
