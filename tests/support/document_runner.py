"""Runs the blocks of one document in their order, in this process and in this folder: ``python document_runner.py BLOCKS.json``.

Python blocks share one namespace. A block whose first line is ``# train.py`` or ``# fit.yaml`` is written to a file of that name instead.
Plain ``fit`` and ``python`` commands are forks of a process that has torch imported and has run no block; bash runs the others.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.cli.main import main as fit


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
