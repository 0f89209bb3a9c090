"""SLURM's short forms: ``node[001-003,007],gpu1`` for names, ``2(x3),1`` for numbers."""

from __future__ import annotations

import re


def expand_nodelist(text: str) -> list[str]:
    """``"node[001-003,007],gpu1"`` -> ``["node001", "node002", "node003", "node007", "gpu1"]``.

    Zeros in front stay; of several brackets the last varies fastest.

    Raises:
        ValueError: not of this form.
    """
    found: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text):  # at commas outside of brackets
        if not re.fullmatch(r"[^\s\[\],]+(\[[^\[\]]+\][^\s\[\],]*)*", word):
            raise ValueError(f"{text!r} is not a list of nodes: {word!r} is not a name")
        names = [""]
        for ranges, literal in re.findall(r"\[([^\[\]]+)\]|([^\[\]]+)", word):
            ends = [literal] if literal else _ranges(ranges, text)
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _ranges(text: str, whole: str) -> list[str]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"{whole!r} is not a list of nodes: {part!r} is not a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"{whole!r} is not a list of nodes: {part!r} counts down")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """``"2(x3),1"`` -> ``[2, 2, 2, 1]``.

    Raises:
        ValueError: not of this form.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of counts: {part!r} is neither a number nor of the form 2(x3)")
        found += [int(match[1])] * int(match[2] or 1)
    return found
