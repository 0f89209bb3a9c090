"""The blocks, headings and links of a Markdown document, and what runs its blocks: ``python documents.py BLOCKS.json``.

The blocks of one document run in their order, in this process and in this folder. Python blocks share one namespace. A block whose first
line is ``# train.py`` or ``# fit.yaml`` is written to a file of that name instead. Plain ``fit`` and ``python`` commands are forks of a
process that has torch imported and has run no block; bash runs the others.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.cli.main import main as fit

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


def sentences(text: str) -> Iterator[str]:
    """The sentences of a document: of its paragraphs, items and cells of tables. A piece of code is one word, a link is its text."""
    parts = [""]
    for line in prose(text):
        line = line.strip()
        if line.startswith("|"):
            parts += re.split(r"(?<!\\)\|", line)
        elif not line or re.match(r"#|[-*] |\d+\. ", line):
            parts.append("" if line.startswith("#") else re.sub(r"^([-*]|\d+\.) ", "", line))
        else:
            parts[-1] += f" {line}"
    for part in parts:
        shown = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", re.sub(r"`[^`]*`", "CODE", part))  # without pictures
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", shown)
        yield from (each.strip() for each in re.split(r"(?<=[.!?])\s+", plain) if each.strip())


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


def serve(pipe: Connection) -> None:
    """Fork for each command that comes, and answer with its exit status. Ends when the other side has closed."""
    while True:
        try:
            words = pipe.recv()
        except EOFError:
            return
        if not (pid := os.fork()):
            pipe.close()
            become(words)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def become(words: list[str]) -> None:
    """What ``fit ...`` or ``python script ...`` does, to this process's end."""
    if words[0] == "fit":
        sys.orig_argv = [sys.executable, "-m", "engine.cli.main", *words[1:]]
        sys.argv = words
        raise SystemExit(fit(words[1:]))
    sys.orig_argv, sys.argv = [sys.executable, *words[1:]], words[1:]
    sys.path[0] = str(Path(words[1]).resolve().parent)
    runpy.run_path(words[1], run_name="__main__")
    raise SystemExit(0)


def shell(text: str, commands: Connection) -> int:
    """Run a block's lines until one fails; its exit status."""
    for line in text.replace("\\\n", " ").splitlines():
        plain = not re.search(r"[|&;<>$*]", line)
        words = shlex.split(line, comments=True) if plain else []
        if words and (words[0] == "fit" or (words[0] == "python" and words[1].endswith(".py"))):
            commands.send(words)
            status = commands.recv()
        else:
            status = subprocess.run(["bash", "-euo", "pipefail", "-c", line]).returncode
        if status:
            return int(status)
    return 0


def run(document: str, block: dict[str, Any], names: dict[str, Any], commands: Connection) -> None:
    """One block.

    Raises:
        SystemExit: it failed; names the block's line.
    """
    language, text, line = block["language"], block["text"], block["line"]
    if block["file"]:
        Path(block["file"]).write_text(text)
    if language == "python":
        code = compile("\n" * line + text, document, "exec")  # tracebacks show the document's own lines
        if not block["file"]:
            exec(code, names)
    elif language == "yaml":
        path = Path(block["file"] or f"line-{line}.yaml")
        path.write_text(text)
        if fit(["config", "--check", str(path)]):
            raise SystemExit(f"{document}:{line}: this YAML is not a valid configuration")
    elif language == "bash" and (status := shell(text, commands)):
        raise SystemExit(f"{document}:{line}: exit status {status}")


def start() -> Connection | None:
    """The other end of a process that serves; ``None`` in that process, when all is done."""
    ours, theirs = Pipe()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    serve(theirs)
    return None


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    order = json.loads(Path(sys.argv[1]).read_text())
    if (server := start()) is not None:
        module = sys.modules["document"] = types.ModuleType(
            "document"
        )  # where pickle and dataclasses look for what the blocks define
        for block in order["blocks"]:
            print(f"--- {order['document']}:{block['line']} ({block['language']})", file=sys.stderr, flush=True)
            run(order["document"], block, module.__dict__, server)
