"""The blocks, headings and links of a Markdown document."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("python", "bash", "yaml", "text")
"""``text`` is shown only; blocks in the other languages run."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>.*)$")
_FILE = re.compile(r"^# (?P<name>[\w./-]+\.(?:py|yaml))$")
_LINK = re.compile(r"\[[^\]]*\]\(\s*(?P<inline>[^)\s]+)[^)]*\)|^ *\[[^\]]+\]:\s*(?P<below>\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is its fence's, from 1; ``file`` the name in its first line, if it has one."""

    language: str
    line: int
    text: str
    file: str = ""


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    skipped = {"build", "dist", "runs", "__pycache__", "node_modules"}
    found = []
    for path in sorted(ROOT.rglob("*.md")):
        folders = path.relative_to(ROOT).parts[:-1]
        if not any(
            name in skipped or name.endswith(".egg-info") or (name.startswith(".") and name != ".github")
            for name in folders
        ):
            found.append(path)
    return found


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a document, in their order.

    Raises:
        ValueError: a block has no end.
    """
    found, lines = [], text.splitlines()
    number = 0
    while number < len(lines):
        if fence := _FENCE.match(lines[number]):
            end = next(
                (i for i in range(number + 1, len(lines)) if lines[i].rstrip() == fence["indent"] + fence["marks"]),
                None,
            )
            if end is None:
                raise ValueError(f"the block in line {number + 1} has no end")
            inner = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
            name = _FILE.match(inner.splitlines()[0]) if inner.strip() else None
            found.append(Block(fence["language"].strip(), number + 1, inner, name["name"] if name else ""))
            number = end
        number += 1
    return found


def prose(text: str) -> Iterator[str]:
    """The lines of a document outside of blocks."""
    end = ""
    for line in text.splitlines():
        if end:
            end = "" if line.rstrip() == end else end
        elif fence := _FENCE.match(line):
            end = fence["indent"] + fence["marks"]
        else:
            yield line


def anchors(text: str) -> set[str]:
    """What ``#...`` may name: the headings as GitHub writes them."""
    headings = (line.lstrip("#").strip() for line in prose(text) if re.match(r"#{1,6} ", line))
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())).replace(" ", "-")
        for heading in headings
    }


def wrong_links(path: Path, text: str) -> list[str]:
    """The relative links of the document at ``path`` that lead nowhere."""
    wrong = []
    for match in _LINK.finditer("\n".join(re.sub(r"`[^`]*`", "", line) for line in prose(text))):
        link = match["inline"] or match["below"]
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(text if file == path else file.read_text())):
            wrong.append(link)
    return wrong


def wrong_rows(text: str) -> list[str]:
    """The rows of tables that have another number of cells than the row above."""
    lines = list(prose(text))
    cells = [len(re.split(r"(?<!\\)\|", line.strip())) if line.lstrip().startswith("|") else 0 for line in lines]
    return [
        line
        for line, above, count in zip(lines[1:], cells, cells[1:], strict=False)
        if above and count and above != count
    ]
